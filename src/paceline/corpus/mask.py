"""Which tokens the target generated: found from token boundaries, not from template markers.

For an assistant turn i an engine is handed render(turns before i, generation prompt) and adds
ids until an end token. So everything in the prompt is context, the generation prompt included,
and what the template writes after the end token (a line feed, say) is the next prompt's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.corpus.end_tokens import TurnEnd, turn_end
from paceline.corpus.rejection import RowRejected
from paceline.corpus.template import (
    Message,
    encode,
    render_prompt,
    render_text,
    rendering_identity,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]] | None
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its template's arguments, and what follows from the two."""

    tokenizer: "PreTrainedTokenizerBase"
    template_args: dict[str, Any]
    end: TurnEnd
    identity: str
    """`rendering_identity`, part of every sample id."""

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        template_args: dict[str, Any],
        folder: Path | None = None,
    ) -> "Renderer":
        """Probe the template once. Raises TargetError where it cannot render an answer."""
        end = turn_end(tokenizer, template_args, folder)
        return cls(tokenizer, template_args, end, rendering_identity(tokenizer, template_args))

    def prompt(self, messages: list[Message], tools: Tools) -> list[int]:
        """Ids [T] with the generation prompt. Raises TemplateRejected."""
        return render_prompt(self.tokenizer, messages, tools, self.template_args)

    def answered(
        self, messages: list[Message], tools: Tools, trained: Sequence[int]
    ) -> tuple[list[int], Spans]:
        """Ids [T] of the whole conversation, and the spans that the `trained` turns generated.

        `trained` are rising indices of assistant turns. Raises TemplateRejected, and RowRejected:
        `template_not_prefix_stable` where the template renders a turn differently once others
        follow it, so that one sequence cannot stand for all its turns; `end_token_in_answer`
        where an engine would have stopped inside the content.
        """
        ids: list[int] = []
        text = ""
        spans: Spans = []
        for turn in trained:
            prompt = self._text(messages[:turn], tools, generation_prompt=True)
            _require_prefix(text, prompt, f"the prompt of turn {turn}")
            whole = self._text(messages[: turn + 1], tools, generation_prompt=False)
            _require_prefix(prompt, whole, f"turn {turn}")
            ids = self._extend(ids, text, prompt)
            answer, text = self._generated(ids, prompt, whole, turn)
            if answer:
                spans.append((len(ids), len(ids) + len(answer)))
            ids = ids + answer
        full = self._text(messages, tools, generation_prompt=False)
        _require_prefix(text, full, "the whole conversation")
        return self._extend(ids, text, full), spans

    def _generated(
        self, prompt_ids: list[int], prompt: str, whole: str, turn: int
    ) -> tuple[list[int], str]:
        """The ids that were generated after the prompt, and the text up to their end."""
        tail = self._extend(prompt_ids, prompt, whole)[len(prompt_ids) :]
        ends = [i for i, token in enumerate(tail) if token in self.end.ids]
        if len(ends) > max(1, self.end.in_closing):
            raise RowRejected("end_token_in_answer", f"turn {turn} contains an end token")
        if ends:
            mark = str(self.tokenizer.convert_ids_to_tokens(tail[ends[0]]))
            at = whole.find(mark, len(prompt))
            return tail[: ends[0] + 1], whole if at < 0 else whole[: at + len(mark)]
        text = whole.removesuffix(self.end.closing)
        if len(text) < len(prompt):
            return [], prompt
        return self._extend(prompt_ids, prompt, text)[len(prompt_ids) :], text

    def _extend(self, ids: list[int], text: str, longer: str) -> list[int]:
        """Ids of `longer`, of which `text` (a prefix) stands as `ids`, whatever could merge.

        An engine never re-tokenises what it was handed, so a token that would reach over the
        boundary is replaced by the tokens of the new text alone.
        """
        merged = encode(self.tokenizer, longer)
        if merged[: len(ids)] == ids:
            return merged
        grown = ids + encode(self.tokenizer, longer[len(text) :])
        if self._decode(grown) != self._decode(merged):
            raise RowRejected(
                "template_not_prefix_stable",
                "the text after a turn's boundary has no tokenisation of its own: "
                f"{longer[max(0, len(text) - 20) : len(text) + 20]!r}",
            )
        return grown

    def _decode(self, ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _text(self, messages: list[Message], tools: Tools, *, generation_prompt: bool) -> str:
        return render_text(
            self.tokenizer,
            messages,
            tools,
            self.template_args,
            generation_prompt=generation_prompt,
        )


def _require_prefix(prefix: str, text: str, what: str) -> None:
    if text.startswith(prefix):
        return
    pairs = enumerate(zip(prefix, text, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), len(text))
    raise RowRejected(
        "template_not_prefix_stable",
        f"{what} is rendered as {text[same : same + 40]!r} where the turns before it, on their "
        f"own, are {prefix[same : same + 40]!r}; corpus.last_turn_only or other "
        "corpus.template_args may help",
    )


def truncate(ids: list[int], spans: Spans, max_length: int) -> tuple[list[int], Spans]:
    """Cut to `max_length` tokens; spans end there too, and those beyond are gone."""
    kept = [(start, min(end, max_length)) for start, end in spans if start < max_length]
    return ids[:max_length], kept
