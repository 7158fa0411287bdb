"""Rendered text to token ids, piece by piece where that gives the ids of the whole.

A tokenizer takes its added tokens out of a text before it does anything else, and handles what is
between two of them by itself. So the ids behind such a token do not depend on what is before it,
and a conversation that grows turn by turn is tokenised once, not once a turn.
"""

import re
from typing import TYPE_CHECKING

from paceline.rows.rejection import RowRejected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEAR = 256
"""Characters at the end of a text in which its last added token nearly always stands."""

_PROBES = ("", " a\n\nb  c ", "x", "\n", "Ünïcödé 中文 🙂\t1234")


class Encoder:
    """The ids that `tokenizer.encode(text, add_special_tokens=False)` gives, faster."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self.anchors = {} if self._backend is None else _anchors(tokenizer)
        """Text to id of the added tokens that a text can be cut in front of."""
        self.anchor_ids = frozenset(self.anchors.values())
        texts = sorted(self.anchors, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def encode(self, text: str) -> list[int]:
        """Ids [T] of a text; the template has put every special token there already."""
        if self._backend is None:
            return _slow(self._tokenizer, text)
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens spelled out."""
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def last_anchor(self, text: str, start: int) -> tuple[int, int] | None:
        """Place and id of the last added token of `text` that begins at `start` or behind it."""
        if self._pattern is None:
            return None
        near = max(start, len(text) - _NEAR)
        for begin in (near, start) if near > start else (start,):
            found = list(self._pattern.finditer(text, begin))
            if found:
                return found[-1].start(), self.anchors[found[-1].group()]
        return None


class GrowingText:
    """A text that only grows, and its ids as an engine holds them: what stands is never changed."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.text = ""
        self.ids: list[int] = []
        self._at = 0
        """Where in the text, and in the ids, what follows no longer depends on what is before."""
        self._index = 0

    def following(self, longer: str) -> list[int]:
        """Ids of what `longer` adds to the text, which it begins with; nothing changes.

        A token that would reach over the boundary is replaced by the tokens of the new text alone.
        Raises RowRejected where the new text has no tokens of its own.
        """
        whole = self._encoder.encode(longer[self._at :])
        own = self.ids[self._index :]
        if whole[: len(own)] == own:
            return whole[len(own) :]
        new = self._encoder.encode(longer[len(self.text) :])
        if self._encoder.decode(own + new) != self._encoder.decode(whole):
            cut = len(self.text)
            raise RowRejected(
                "template_not_prefix_stable",
                "the text after a turn's boundary has no tokenisation of its own: "
                f"{longer[max(0, cut - 20) : cut + 20]!r}",
            )
        return new

    def extend(self, longer: str, ids: list[int] | None = None) -> None:
        """Grow to `longer`, whose new part has `ids`; those of `following` where not given."""
        new = self.following(longer) if ids is None else ids
        anchor = self._encoder.last_anchor(longer, len(self.text))
        if anchor is not None:
            place, token = anchor
            known = self._encoder.anchor_ids
            behind = next((i for i in range(len(new) - 1, -1, -1) if new[i] in known), None)
            if behind is not None and new[behind] == token:
                self._at, self._index = place, len(self.ids) + behind
        self.ids = self.ids + new
        self.text = longer


def _backend(tokenizer: "PreTrainedTokenizerBase"):
    """The Rust tokenizer, if it says what the whole one says."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        return None
    backend.no_truncation()
    backend.no_padding()
    probes = [*_PROBES, "".join([f"{token} {token}\n" for token in tokenizer.all_special_tokens])]
    for text in probes:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if ids != _slow(tokenizer, text):
            return None
    return backend


def _slow(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _anchors(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    # One that is looked for after normalisation, or only between words, depends on what is around.
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content and not token.normalized and not token.single_word
    }
