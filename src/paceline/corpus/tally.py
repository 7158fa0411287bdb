"""The counts of `prepare`: every row of every source is accounted for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.durable.errors import IntegrityError
from paceline.types import Sample, Split


@dataclass(slots=True)
class SourceTally:
    """Counts of one source."""

    name: str
    read: int = 0
    """Lines or array elements, blank ones included."""
    accepted: int = 0
    blank: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Quarantined rows by reason code."""

    @property
    def quarantined(self) -> int:
        """Rows left out, for whatever reason."""
        return self.reasons.total()

    def check(self) -> None:
        """Raise IntegrityError where a row got lost between reading and writing."""
        if self.read != self.accepted + self.quarantined + self.blank:
            raise IntegrityError(f"source {self.name}: {self.line()}: the counts do not add up")

    def line(self) -> str:
        """The invariant with its numbers, as the report shows it."""
        return (
            f"read {self.read} = accepted {self.accepted} + quarantined {self.quarantined} "
            f"+ blank {self.blank}"
        )

    def numbers(self) -> dict[str, Any]:
        """For the report."""
        return {
            "read": self.read,
            "accepted": self.accepted,
            "quarantined": self.quarantined,
            "blank": self.blank,
            "reasons": dict(sorted(self.reasons.items())),
        }


@dataclass(slots=True)
class Tally:
    """Counts of a whole run."""

    sources: list[SourceTally] = field(default_factory=list)
    samples: Counter[Split] = field(default_factory=Counter)
    tokens: Counter[Split] = field(default_factory=Counter)
    loss_tokens: Counter[Split] = field(default_factory=Counter)
    """Trainable tokens, after the cut to `corpus.max_length`."""
    truncated: int = 0

    def accept(self, sample: Sample, *, truncated: bool) -> None:
        """Count one sample's tokens."""
        self.samples[sample.split] += 1
        self.tokens[sample.split] += len(sample.input_ids)
        self.loss_tokens[sample.split] += sample.num_loss_tokens
        self.truncated += truncated

    @property
    def read(self) -> int:
        """Rows of all sources so far."""
        return sum(source.read for source in self.sources)

    @property
    def accepted(self) -> int:
        """Samples so far."""
        return sum(source.accepted for source in self.sources)

    @property
    def quarantined(self) -> int:
        """Rows left out so far."""
        return sum(source.quarantined for source in self.sources)

    @property
    def reasons(self) -> Counter[str]:
        """Quarantined rows by reason code, all sources together."""
        return sum((source.reasons for source in self.sources), Counter[str]())

    @property
    def train_tokens(self) -> int:
        """Tokens of training and validation samples."""
        return self.tokens[Split.TRAIN] + self.tokens[Split.VALIDATION]

    @property
    def trainable_share(self) -> float:
        """Share of those tokens that is trained on."""
        trainable = self.loss_tokens[Split.TRAIN] + self.loss_tokens[Split.VALIDATION]
        return trainable / self.train_tokens if self.train_tokens else 0.0

    def numbers(self) -> dict[str, Any]:
        """For the report: JSON values."""
        return {
            "read": self.read,
            "accepted": self.accepted,
            "quarantined": self.quarantined,
            "blank": sum(source.blank for source in self.sources),
            "reasons": dict(sorted(self.reasons.items())),
            "sources": {source.name: source.numbers() for source in self.sources},
            "samples": {split.value: self.samples[split] for split in Split},
            "tokens": {split.value: self.tokens[split] for split in Split},
            "loss_tokens": {split.value: self.loss_tokens[split] for split in Split},
            "trainable_share": self.trainable_share,
            "truncated": self.truncated,
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        for source in self.sources:
            yield f"{source.name}: {source.line()}"
            for reason, count in source.reasons.most_common():
                yield f"  {count} {reason}"
        for split in Split:
            if self.samples[split]:
                # Prompts that are still to be answered have no trainable token yet.
                trainable = self.loss_tokens[split]
                what = "samples" if trainable else "prompts"
                rest = f", {trainable} trainable" if trainable else ""
                yield (
                    f"{split.value}: {self.samples[split]} {what}, "
                    f"{self.tokens[split]} tokens{rest}"
                )
        if self.truncated:
            yield f"{self.truncated} samples were cut to corpus.max_length"
