"""Which languages the user turns are in, by a sample of each source."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.corpus.lint.lowest import Lowest
from paceline.corpus.preview import decoded
from paceline.types import Sample

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier
    from transformers import PreTrainedTokenizerBase

MOST = 2000
"""Samples of a source that are looked at, those of the lowest id, which is a hash."""

LEAST_LETTERS = 20
"""A text with fewer letters is told by its script alone."""

_READ = 600
"""Characters of a text that are looked at."""

_LEAST_SURE = 0.2
"""As py3langid counts it, whatever the length of the text."""

_WORDS = {"zxx": "code or numbers", "und": "unsure"}


class Languages:
    """Names the language of samples; memory is bounded for each source."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._found: dict[str, Lowest[str]] = defaultdict(lambda: Lowest(MOST))

    def add(self, sample: Sample) -> None:
        """Look at a sample, if its hash is low enough."""
        kept = self._found[sample.source]
        if kept.wants(sample.sample_id):
            kept.add(sample.sample_id, self._language(self._text(sample)))

    def counts(self) -> dict[str, Counter[str]]:
        """Samples looked at, by source and language (ISO 639), `short, …` or what else it is."""
        return {source: Counter(kept.items()) for source, kept in self._found.items()}

    def _text(self, sample: Sample) -> str:
        if sample.messages:
            texts = (str(m["content"]) for m in sample.messages if m["role"] == "user")
            return "\n".join(texts)[:_READ]
        return decoded(sample.input_ids[:_READ], self._tokenizer)[:_READ]

    def _language(self, text: str) -> str:
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
