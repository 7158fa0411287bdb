"""Which language a text is in."""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

LEAST_LETTERS = 20
"""A text with fewer letters is told by its script alone."""

READ = 600
"""Characters of a text that are looked at."""

_LEAST_SURE = 0.2
"""As py3langid counts it, whatever the length of the text."""

_WORDS = {"zxx": "code or numbers", "und": "unsure"}


class LanguageNames:
    """Names the language of texts; loads its model with the first one that has enough letters."""

    def of(self, text: str) -> str:
        """ISO 639 code of the language, `short, SCRIPT`, or what else it is, by the start alone."""
        text = text[:READ]
        scripts = Counter(_scripts(text))
        if scripts.total() >= LEAST_LETTERS:
            code = str(self._identifier.classify(text)[0])
            return _WORDS.get(code, code)
        if not scripts:
            return "no letters"
        return f"short, {max(scripts.items(), key=lambda item: (item[1], item[0]))[0]}"

    @cached_property
    def _identifier(self) -> "LanguageIdentifier":
        # Its model takes most of a second to unpack.
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        return LanguageIdentifier.from_model_file(
            MODEL_FILE, norm_probs=True, min_confidence=_LEAST_SURE
        )


def _scripts(text: str) -> Iterator[str]:
    """The script of each letter, such as `latin`, as its name in Unicode begins."""
    for character in text:
        if character.isalpha():
            yield unicodedata.name(character, "unnamed").partition(" ")[0].lower()
