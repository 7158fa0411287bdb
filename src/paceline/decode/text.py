"""Tokens to text, token by token, as they are committed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class GrowingText:
    """The text of a growing answer.

    A token's text depends on those before it (a leading space, a character cut in two), so each is
    what the text has more than before; a character that is not whole yet waits for its rest.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        """Whose text is told: what the next ones are read behind."""
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """What this token adds to the text; empty while a character is incomplete."""
        self._pending.append(token)
        text = self._more()
        if text.endswith(_INCOMPLETE):
            return ""
        return self._told(text)

    def end(self) -> str:
        """What is left at the end of the answer."""
        return self._told(self._more()) if self._pending else ""

    def _more(self) -> str:
        before = self._text(self._before)
        return self._text([*self._before, *self._pending])[len(before) :]

    def _told(self, text: str) -> str:
        self._before, self._pending = self._pending, []
        return text

    def _text(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)
