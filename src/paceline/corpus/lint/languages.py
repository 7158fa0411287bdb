"""Which languages the user turns are in, by a sample of each source."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from paceline.corpus.lint.lowest import Lowest
from paceline.corpus.preview import decoded
from paceline.rows.language import READ, LanguageNames
from paceline.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST = 2000
"""Samples of a source that are looked at, those of the lowest id, which is a hash."""


class Languages:
    """Names the language of samples; memory is bounded for each source."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._names = LanguageNames()
        self._found: dict[str, Lowest[str]] = defaultdict(lambda: Lowest(MOST))

    def add(self, sample: Sample) -> None:
        """Look at a sample, if its hash is low enough."""
        kept = self._found[sample.source]
        if kept.wants(sample.sample_id):
            kept.add(sample.sample_id, self._names.of(self._text(sample)))

    def counts(self) -> dict[str, Counter[str]]:
        """Samples looked at, by source and language (ISO 639), `short, …` or what else it is."""
        return {source: Counter(kept.items()) for source, kept in self._found.items()}

    def _text(self, sample: Sample) -> str:
        if sample.messages:
            texts = (str(m["content"]) for m in sample.messages if m["role"] == "user")
            return "\n".join(texts)
        return decoded(sample.input_ids[:READ], self._tokenizer)
