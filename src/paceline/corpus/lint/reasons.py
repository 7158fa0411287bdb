"""Why rows are left out, in words for somebody who has never seen the codes, and what to do."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Words:
    """What a reason code says."""

    meaning: str
    advice: str
    kind: Literal["fault", "choice"] = "fault"
    """A choice: these rows are left out on purpose, and nothing is wrong with them."""


_REPAIR = "Repair or regenerate the file; the examples below say where it is damaged."
_FORM = "Convert the rows to `messages`, `conversations`, `prompt`, `text` or `input_ids`."
_TOKENS = "Make the tokens anew with this target's tokenizer, or give the conversations as text."
_TEXT_ONLY = "Paceline trains on text: remove the part, or put its text in its place."
_CALLS = "Write tool calls as OpenAI does: a function name, and arguments as a JSON object."
_SHORTEN = "Raise corpus.max_length, or shorten the rows."

_WORDS = {
    "answer_not_from_prompt": Words(
        "The chat template shows the answer in a way that no engine could have generated it after "
        "the prompt, as with templates that open a thought which the data do not have.",
        "Have the target answer itself (regenerate.enabled), keep the reasoning in the data, or "
        "set the template's switch, such as corpus.template_args.enable_thinking=false.",
    ),
    "bad_conversation": Words("The turns are not a list.", _FORM),
    "bad_input_ids": Words("`input_ids` is no list of whole numbers.", _TOKENS),
    "bad_json": Words("The line is not JSON.", _REPAIR),
    "bad_loss_mask": Words("`loss_mask` does not fit its tokens, or is not of 0 and 1.", _TOKENS),
    "bad_tool_arguments": Words("The arguments of a tool call are not a JSON object.", _CALLS),
    "bad_tool_calls": Words("Tool calls of unknown form.", _CALLS),
    "bad_tools_json": Words("`tools` is not a list of objects, or not JSON.", _CALLS),
    "bad_turn": Words("A turn is not an object.", _FORM),
    "bad_utf8": Words("The line is not UTF-8 text.", "Convert the file to UTF-8."),
    "consecutive_roles": Words(
        "Two turns of one role in a row.",
        "Mend the rows, or have them kept or joined (corpus.consecutive_roles).",
    ),
    "duplicate": Words(
        "The very same conversation came before.", "Nothing: the first is kept.", "choice"
    ),
    "empty_conversation": Words("The list of turns is empty.", "Remove the rows."),
    "empty_text": Words("The text has no words.", "Remove the rows."),
    "end_token_in_answer": Words(
        "The answer holds a token that stops an engine, so it would have ended there. Often the "
        "text was rendered with a chat template before.",
        "Take the template's marks out of the text of the turns.",
    ),
    "exceeds_max_length": Words("Longer than corpus.max_length (corpus.on_length).", _SHORTEN),
    "in_heldout": Words(
        "The prompt is also an evaluation prompt, and must not be trained on.",
        "Nothing, unless it is many: then the evaluation was made from this data.",
        "choice",
    ),
    "leading_assistant": Words(
        "An assistant turn comes before the first user turn.",
        "Keep it as context (corpus.leading_assistant=context_only).",
    ),
    "line_too_long": Words("The line is longer than 64 MiB, so no conversation.", _REPAIR),
    "loop": Words(
        "An answer goes round in circles (corpus.on_loop).",
        "Generate these answers again, with another temperature.",
    ),
    "no_answer": Words(
        "There is no assistant turn to train on.",
        "Have the target answer the prompts (regenerate.enabled, here --prompts), or give rows "
        "with answers.",
    ),
    "no_conversation": Words("No key that Paceline knows holds a conversation.", _FORM),
    "no_loss_mask": Words("Tokens without a mask: what is trained on is never guessed.", _TOKENS),
    "no_user_turn": Words("Nobody asks anything.", "Give the rows a user turn."),
    "not_an_object": Words("The line is JSON, but not an object with keys.", _FORM),
    "over_max_samples": Words(
        "The source is capped (max_samples).", "Nothing: it was asked for.", "choice"
    ),
    "over_weight": Words(
        "The source is larger than its share of the mixture (weight).",
        "Nothing: it was asked for.",
        "choice",
    ),
    "overlaps_heldout": Words(
        "Too much of an evaluation prompt stands in this one (corpus.max_overlap).",
        "Nothing: it was asked for.",
        "choice",
    ),
    "prompt_exceeds_max_length": Words(
        "The prompt alone fills corpus.max_length, so no answer fits.", _SHORTEN
    ),
    "prompt_exceeds_max_prompt_length": Words(
        "The prompt is longer than corpus.max_prompt_length.",
        "Nothing: it was asked for.",
        "choice",
    ),
    "same_prompt": Words(
        "Another answer to this prompt was kept (corpus.on_same_prompt).",
        "Nothing: it was asked for.",
        "choice",
    ),
    "template_not_prefix_stable": Words(
        "The text after a turn has no tokens of its own, so it cannot be said where the answer "
        "begins or ends.",
        "Leave the rows out; where it is many, the tokenizer and the template do not fit.",
    ),
    "template_rejected": Words(
        "The target's chat template refuses these turns; the examples quote its words.",
        "Bring the roles into the order that it wants (corpus.consecutive_roles=merge may do), or "
        "give the template that the target is served with (corpus.template_file).",
    ),
    "token_id_out_of_range": Words("Token ids that this target does not have.", _TOKENS),
    "tool_calls_not_rendered": Words(
        "A turn calls a tool, and the chat template leaves the call out.",
        "Give the template that the target is served with (corpus.template_file), or leave these "
        "rows out.",
    ),
    "torn_file": Words(
        "The file ends in the middle of a row, or its packing is damaged: all behind is lost.",
        "Fetch the file again.",
    ),
    "too_deeply_nested": Words("Tools or arguments inside one another, too deep.", _CALLS),
    "too_few_loss_tokens": Words(
        "Next to nothing is marked to be trained on: an empty answer, or a mask that is all zeros.",
        "Look at the examples: fill or remove empty answers, mend the mask (1 is trained on).",
    ),
    "unknown_role": Words(
        "A role that Paceline does not know.",
        "Say what it is, such as --set corpus.roles.expert=assistant.",
    ),
    "unsupported_content": Words("The content of a turn is no text.", _TEXT_ONLY),
}

REASONS = frozenset(_WORDS)


def words_of(code: str) -> Words:
    """What a reason says; of one that says itself what kind of content it is, in general."""
    if code.startswith("content_"):
        kind = code.removeprefix("content_").replace("_", " ")
        return Words(f"A turn has a part that is no text: {kind}.", _TEXT_ONLY)
    return _WORDS.get(code, Words(code.replace("_", " "), "Look at the examples."))
