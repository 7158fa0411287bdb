"""A prompt and what the target generated for it, as a sample."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.durable.errors import DataError
from paceline.rows.ids import given_sample_id, sample_id
from paceline.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answer_sample(
    prompt: Sample,
    answer_ids: Sequence[int],
    finish: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    identity: str,
) -> Sample:
    """The sample of a regenerated answer.

    `prompt` has no loss spans and ends with the generation prompt; `answer_ids` [N] are the ids
    as generated, with the end token last where `finish` is "stop" and none where it is "length".
    They are appended as they are, never decoded and tokenised again: the text of an answer has
    more than one tokenisation and the target chose this one. `identity` is `rendering_identity`.
    Raises ValueError for a prompt that already has an answer, another `finish`, or no ids.
    """
    if prompt.loss_spans:
        raise ValueError(f"sample {prompt.sample_id} has an answer already")
    if finish not in ("stop", "length"):
        raise ValueError(f"finish {finish!r} is neither 'stop' nor 'length'")
    if not answer_ids:
        raise ValueError(f"sample {prompt.sample_id}: no generated ids")
    start = len(prompt.input_ids)
    text = tokenizer.decode(
        list(answer_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    messages = [*prompt.messages, {"role": "assistant", "content": str(text)}]
    name = sample_id(messages, prompt.tools, identity)
    if not prompt.messages:
        # A prompt that came as tokens is told from another by them alone.
        name = given_sample_id(["tokens", prompt.input_ids, list(answer_ids)], identity)
    return Sample(
        sample_id=name,
        prompt_id=prompt.prompt_id,
        source=prompt.source,
        split=prompt.split,
        messages=messages,
        tools=prompt.tools,
        input_ids=[*prompt.input_ids, *answer_ids],
        loss_spans=[(start, start + len(answer_ids))],
        finish=finish,
    )


def answer_room(prompt: Sample, max_length: int) -> int:
    """Tokens that an answer may have, at least 1, beside its prompt in `max_length`.

    Raises DataError for a prompt that leaves none, or has an answer already.
    """
    if prompt.loss_spans:
        raise DataError(
            f"sample {prompt.sample_id} has an answer already: the corpus was prepared with "
            "regenerate.enabled off. Run prepare again with this recipe."
        )
    room = max_length - len(prompt.input_ids)
    if room < 1:
        raise DataError(
            f"sample {prompt.sample_id}: its prompt of {len(prompt.input_ids)} tokens leaves no "
            f"room for an answer; the target reads {max_length}. Set corpus.max_length to that."
        )
    return room
