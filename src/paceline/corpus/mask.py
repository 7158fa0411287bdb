"""Which tokens the target generated: found from token boundaries, not from template markers.

For an assistant turn i an engine is handed render(turns before i, generation prompt) and adds
ids until an end token. So everything in the prompt is context, the generation prompt included,
and what the template writes after the end token (a line feed, say) is the next prompt's.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.corpus.encoder import Encoder, GrowingText
from paceline.corpus.end_tokens import TurnEnd, turn_end
from paceline.recipe.schema import Recipe
from paceline.rows.conversation import Message
from paceline.rows.rejection import RowRejected, TemplateRejected
from paceline.target.chat import ChatTemplate, load_tokenizer, rendering_identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]] | None
Spans = list[tuple[int, int]]

_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT_OPENS = re.compile(_OPEN + r"\s*$")
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Event:
    """One sequence that an engine would have held, with what it generated in it.

    A conversation is one event as long as its template shows earlier answers as they were
    generated. Where it does not, as with templates that take the reasoning out of the history,
    the next answer begins an event of its own.
    """

    ids: list[int]
    """Ids [T]."""
    spans: Spans
    """Half-open ranges of `ids` that the target generated, in order."""
    end: int
    """The event is that of the turns before this one."""
    left_out: int = 0
    """Trained turns whose `reasoning_content` the template does not show."""


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its template's arguments, and what follows from the two."""

    tokenizer: "PreTrainedTokenizerBase"
    template_args: dict[str, Any]
    end: TurnEnd
    identity: str
    """`rendering_identity`, part of every sample id."""
    encoder: Encoder
    template: ChatTemplate

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        template_args: dict[str, Any],
        folder: Path | None = None,
    ) -> "Renderer":
        """Probe the template once. Raises TargetError where it cannot render an answer."""
        return cls(
            tokenizer=tokenizer,
            template_args=template_args,
            end=turn_end(tokenizer, template_args, folder),
            identity=rendering_identity(tokenizer, template_args),
            encoder=Encoder(tokenizer),
            template=ChatTemplate(tokenizer, template_args),
        )

    def prompt(self, messages: list[Message], tools: Tools) -> list[int]:
        """Ids [T] with the generation prompt: what an engine is handed. Raises TemplateRejected."""
        return self.encoder.encode(self.template.text(messages, tools, generation_prompt=True))

    def shows_tools(self, prompt: list[Message], tools: Tools) -> bool:
        """Whether `tools` change what an engine is handed."""
        try:
            with_them = self.template.text(prompt, tools, generation_prompt=True)
            return with_them != self.template.text(prompt, None, generation_prompt=True)
        except TemplateRejected:
            # A template that raises without them looks at them.
            return True

    def events(self, messages: list[Message], tools: Tools, trained: Sequence[int]) -> list[Event]:
        """The events that generated the `trained` turns, which are rising indices of assistant's.

        Raises TemplateRejected, and RowRejected: `answer_not_from_prompt` where the template shows
        an answer that no engine could have given to its prompt; `end_token_in_answer` where an
        engine would have stopped inside the content; `tool_calls_not_rendered` where the template
        shows none.
        """
        events: list[Event] = []
        held, spans, whole = GrowingText(self.encoder), list[tuple[int, int]](), ""
        before, left_out = -1, 0
        for turn in trained:
            prompt = self.template.text(messages[:turn], tools, generation_prompt=True)
            if not prompt.startswith(held.text):
                held.extend(whole)
                events.append(Event(held.ids, spans, before + 1, left_out))
                held, spans, left_out = GrowingText(self.encoder), [], 0
            shown = self.template.text(messages[: turn + 1], tools, generation_prompt=False)
            whole = self._answered(prompt, shown, messages, tools, turn)
            generated, thought = whole[len(prompt) :], _thought(messages[turn])
            _require_calls(generated, messages[turn], turn)
            left_out += thought is not None and thought.reasoning not in generated
            held.extend(prompt)
            start = len(held.ids)
            self._generate(held, whole, turn)
            if len(held.ids) > start:
                spans.append((start, len(held.ids)))
            before = turn
        full = whole
        if before + 1 < len(messages):
            full = self.template.text(messages, tools, generation_prompt=False)
        is_all = full.startswith(held.text)
        held.extend(full if is_all else whole)
        end = len(messages) if is_all else before + 1
        return [*events, Event(held.ids, spans, end, left_out)]

    def _generate(self, held: GrowingText, whole: str, turn: int) -> None:
        """Let `held`, a prompt, grow by what was generated: up to the end token, included."""
        prompt, tail = held.text, held.following(whole)
        ends = sorted(place for end in self.end.ids for place in _places(tail, end))
        if len(ends) > max(1, self.end.in_closing):
            raise RowRejected("end_token_in_answer", f"turn {turn} contains an end token")
        if ends:
            mark = str(self.tokenizer.convert_ids_to_tokens(tail[ends[0]]))
            at = whole.find(mark, len(prompt))
            held.extend(whole if at < 0 else whole[: at + len(mark)], tail[: ends[0] + 1])
            return
        text = whole.removesuffix(self.end.closing)
        if len(text) > len(prompt):
            held.extend(text)

    def _answered(
        self, prompt: str, shown: str, messages: list[Message], tools: Tools, turn: int
    ) -> str:
        """The prompt with its answer as it was generated; `shown` is how the template has it."""
        message = messages[turn]
        # What an engine wrote around a call, only the template knows.
        thought = None if message.get("tool_calls") else _thought(message)
        if shown.startswith(prompt):
            is_cut = thought is not None and thought.reasoning not in shown[len(prompt) :]
            if thought is None or not (is_cut and thought.is_inline):
                return shown
            # The template takes reasoning out of every answer, be it the last one: what stands in
            # the data is what was generated.
            return prompt + thought.text + self.end.closing
        opened = _THOUGHT_OPENS.search(prompt)
        if opened is not None and thought is not None:
            # The prompt has opened the thought, perhaps with the line feed that the data have too.
            blanks = opened.group().removeprefix(_OPEN)
            return prompt + thought.text.removeprefix(_OPEN).removeprefix(blanks) + self.end.closing
        answer = self._behind_the_question(prompt, shown, messages[:turn], tools)
        if answer is None or message["content"].strip() not in answer:
            raise RowRejected("answer_not_from_prompt", _difference(prompt, shown, turn))
        return prompt + answer

    def _behind_the_question(
        self, prompt: str, shown: str, before: list[Message], tools: Tools
    ) -> str | None:
        """What is shown behind the turn that was answered, and the generation prompt.

        A template that shows earlier turns differently once they are answered, such as one that
        writes the system turn into the last question alone, still shows the answer behind it.
        """
        asked = before[-1]["content"].strip() if before else ""
        unasked = self.template.text(before, tools, generation_prompt=False)
        if not asked or not prompt.startswith(unasked):
            return None
        at = prompt.rfind(asked, 0, len(unasked))
        _, found, answer = shown.rpartition(prompt[at:]) if at >= 0 else ("", "", "")
        return answer if found else None


def _require_calls(generated: str, message: Message, turn: int) -> None:
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        if name not in generated:
            raise RowRejected(
                "tool_calls_not_rendered",
                f"turn {turn} calls {name!r}, and the chat template leaves that out",
            )


def _places(ids: list[int], wanted: int) -> Iterator[int]:
    place = -1
    try:
        while True:
            place = ids.index(wanted, place + 1)
            yield place
    except ValueError:
        return


def renderer_of(recipe: Recipe) -> Renderer:
    """That of the recipe's target. Raises TargetError as `load_tokenizer` and `Renderer.of` do."""
    tokenizer = load_tokenizer(recipe.target.path, recipe.corpus.template_file)
    return Renderer.of(tokenizer, recipe.corpus.template_args, Path(recipe.target.path))


@dataclass(frozen=True, slots=True)
class _Thought:
    """An answer that begins with reasoning."""

    text: str
    """All of it, as a target writes it."""
    reasoning: str
    is_inline: bool
    """Whether it stands in the content, not in a key of its own."""


def _thought(message: Message) -> _Thought | None:
    content: str = message["content"]
    if _CLOSE in content:
        reasoning = content.split(_CLOSE)[0].split(_OPEN)[-1].strip()
        return _Thought(content, reasoning, is_inline=True)
    for key in _REASONING:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip():
            text = f"{reasoning.strip(chr(10))}\n{_CLOSE}\n\n{content}"
            return _Thought(text, reasoning.strip(), is_inline=False)
    return None


def _difference(prompt: str, shown: str, turn: int) -> str:
    pairs = enumerate(zip(prompt, shown, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(shown)))
    return (
        f"turn {turn} is shown as {shown[same : same + 40]!r} where its prompt goes on with "
        f"{prompt[same : same + 40]!r}: have the target answer (regenerate.enabled), give the "
        "reasoning, or set other corpus.template_args"
    )


def truncate(ids: list[int], spans: Spans, max_length: int) -> tuple[list[int], Spans]:
    """Cut to `max_length` tokens; spans end there too, and those beyond are gone."""
    kept = [(start, min(end, max_length)) for start, end in spans if start < max_length]
    return ids[:max_length], kept
