"""Which tokens a drafter with a reduced vocabulary proposes, and what that leaves out."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.drafter.vocabulary import Coverage, DraftVocabulary, choose_vocabulary, coverage
from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.fs import write_atomic
from paceline.recipe.drafter_inputs import drafter_input_fields
from paceline.recipe.fingerprint import fingerprint
from paceline.recipe.schema import DrafterRecipe
from paceline.target.spec import TargetSpec
from paceline.target.tokenizer import load_tokenizer, tokenizer_fields
from paceline.train.vocab_text import read_texts
from paceline.types.sample import Split, read_samples

_LOG = logging.getLogger(__name__)

_LITTLE = 0.95
"""Coverage below this share is warned of: each token outside ends the block it stands in."""

_BATCH = 1 << 20
"""Characters tokenized together, and tokens counted together."""

_TELL_SECONDS = 15.0


class TokenCounter:
    """Counts token ids; memory is that of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._waiting: list[int] = []

    def add(self, ids: Sequence[int]) -> None:
        """Count these ids, each below `vocab_size`."""
        self._waiting += ids
        if len(self._waiting) >= _BATCH:
            self._count()

    def counts(self) -> torch.Tensor:
        """int64 [V]."""
        self._count()
        return self._counts

    def _count(self) -> None:
        ids = torch.tensor(self._waiting, dtype=torch.int64)
        self._counts += torch.bincount(ids, minlength=self._counts.numel())
        self._waiting = []


class VocabularyCounts:
    """Token counts of a run, made when they are asked for."""

    def __init__(
        self, recipe: DrafterRecipe, spec: TargetSpec, target: Path, *, samples: Path, kept: Path
    ) -> None:
        """`samples` is the corpus that is trained on; the counts of texts are kept in `kept`."""
        self._recipe, self._spec, self._target = recipe, spec, target
        self._samples, self._kept = samples, kept

    @cached_property
    def answers(self) -> dict[Split, torch.Tensor]:
        """int64 [V] of the tokens in the loss mask, by split."""
        counters = {split: TokenCounter(self._spec.vocab_size) for split in Split}
        for sample in read_samples(self._samples):
            for start, end in sample.loss_spans:
                counters[sample.split].add(sample.input_ids[start:end])
        return {split: counter.counts() for split, counter in counters.items()}

    @cached_property
    def texts(self) -> torch.Tensor:
        """int64 [V] of all tokens of `drafter.vocab_text`.

        Counted once: another start of the training reads the counts again, as long as texts and
        tokenizer are the same. Raises DataError as `read_texts` does.
        """
        if not self._recipe.vocab_text:
            return torch.zeros(self._spec.vocab_size, dtype=torch.int64)
        fields = {
            "vocab_size": self._spec.vocab_size,
            **tokenizer_fields(self._target),
            **drafter_input_fields(self._recipe),
        }
        asked = fingerprint(fields)
        found = _read_kept(self._kept, asked)
        if found is None:
            paths = [Path(path) for path in self._recipe.vocab_text]
            counts = count_texts(paths, self._target, self._spec.vocab_size)
            found = _Kept(fingerprint=asked, counts=counts.tolist())
            found = replace(found, checksum=_checksum(found))
            write_atomic(self._kept, msgspec.json.encode(found))
        return torch.tensor(found.counts, dtype=torch.int64)

    def choose(self) -> DraftVocabulary | None:
        """The vocabulary of `drafter.draft_vocab`; None for the target's whole one.

        The target's end tokens are always in it: a drafter that cannot propose them loses the
        last round of every answer. Raises RecipeError as `choose_vocabulary` does.
        """
        if self._recipe.draft_vocab is None:
            return None
        return choose_vocabulary(
            self.answers[Split.TRAIN] + self.texts,
            self._recipe.draft_vocab,
            tokenizer_size=self._spec.tokenizer_size,
            always=[i for i in self._spec.eos_token_ids if i < self._spec.tokenizer_size],
        )

    def report(self, vocabulary: DraftVocabulary) -> "VocabularyReport":
        """What `vocabulary` covers of what was counted."""
        counted = self.answers[Split.TRAIN] + self.texts
        return VocabularyReport(
            size=len(vocabulary),
            of=self._spec.tokenizer_size,
            train=coverage(vocabulary, self.answers[Split.TRAIN]),
            validation=coverage(vocabulary, self.answers[Split.VALIDATION]),
            text=coverage(vocabulary, self.texts) if self._recipe.vocab_text else None,
            never_seen=int((counted[vocabulary.ids.cpu()] == 0).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class VocabularyReport:
    """What a reduced vocabulary covers."""

    size: int
    of: int
    """Tokens of the target's tokenizer."""
    train: Coverage
    """Of the tokens trained on."""
    validation: Coverage
    """Of the validation samples' answers."""
    text: Coverage | None
    """Of the texts counted beside them; None without any."""
    never_seen: int
    """Its ids that neither the answers nor the texts have."""

    def numbers(self) -> dict[str, Any]:
        """JSON values for the stage's report."""
        values: dict[str, Any] = {
            "size": self.size,
            "never_seen": self.never_seen,
            "train_tokens": self.train.total,
            "train_coverage": self.train.share,
            "validation_tokens": self.validation.total,
            "validation_coverage": self.validation.share,
        }
        if self.text is not None:
            values |= {"text_tokens": self.text.total, "text_coverage": self.text.share}
        return values

    def fact(self) -> str:
        """What it covers, in a sentence."""
        parts = [f"{_percent(self.train)} of the tokens trained on"]
        if self.validation.total:
            parts.append(f"{_percent(self.validation)} of the validation answers")
        if self.text is not None:
            parts.append(f"{_percent(self.text)} of {self.text.total:,} tokens of text")
        return (
            f"draft vocabulary: {self.size:,} of {self.of:,} tokens, which are {', '.join(parts)}"
        )

    def warnings(self) -> Iterator[str]:
        """What it lacks, in sentences; none where all is well."""
        if self.never_seen:
            yield (
                f"{self.never_seen} ids never seen are in the draft vocabulary. Count "
                "more text (drafter.vocab_text), or lower drafter.draft_vocab."
            )
        low = [
            f"{_percent(part)} of {name}"
            for name, part in (
                ("the tokens trained on", self.train),
                ("the validation answers", self.validation),
            )
            if part.share < _LITTLE
        ]
        if low:
            yield (
                f"only {' and '.join(low)} can be proposed; below {_LITTLE:.0%}, "
                "acceptance suffers. Raise drafter.draft_vocab."
            )


def count_texts(paths: Iterable[Path], target: Path, vocab_size: int) -> torch.Tensor:
    """Token counts int64 [V] of texts, in the target's own tokenizer.

    Raises TargetError without a usable tokenizer, DataError as `read_texts` does.
    """
    tokenizer = load_tokenizer(target)
    counter = TokenCounter(vocab_size)
    told = time.monotonic()
    for path in paths:
        tokens = 0
        for batch in _batches(read_texts(path)):
            for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                tokens += len(ids)
                counter.add(ids)
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                _LOG.info("counting %s for the draft vocabulary: %s tokens", path, f"{tokens:,}")
        _LOG.info("%s: %s tokens counted for the draft vocabulary", path, f"{tokens:,}")
    return counter.counts()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, length = [], 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= _BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The file of text counts."""

    fingerprint: str
    counts: list[int]
    checksum: str = ""


def _read_kept(path: Path, asked: str) -> _Kept | None:
    """The kept counts, if they are of what is asked for, and as they were written."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeError):
        kept = None
    if kept is None or kept.checksum != _checksum(kept):
        _LOG.warning("%s is not as it was written; the texts are counted again", path)
        return None
    return kept if kept.fingerprint == asked else None


def _checksum(kept: _Kept) -> str:
    return crc64_hex(crc64(msgspec.json.encode(replace(kept, checksum=""))))


def _percent(part: Coverage) -> str:
    # Cut, not rounded: 99.96 % is not all of it.
    return f"{int(part.share * 1000) / 10:.1f} %"
