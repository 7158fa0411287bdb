"""The counts of `prepare`: every row of every source is accounted for."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.durable.errors import IntegrityError
from paceline.types import Split

_MOST_FILES = 1000
"""Files of a source that the report names."""

_NAMED = 5
"""Files that one sentence names."""

_TOLD_FILES = 12
"""Files of a source that the terminal names."""


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
    samples: int = 0
    """Of accepted rows: an answer that its template shows differently later is one of its own."""
    tokens: int = 0
    loss_tokens: int = 0
    files: Counter[str] = field(default_factory=Counter)
    """Rows read, blank ones included, by file."""
    files_left_out: Counter[str] = field(default_factory=Counter)
    """Quarantined rows by file."""
    torn: dict[str, int] = field(default_factory=dict)
    """Files that break off, with the rows that were read before."""
    unread: tuple[str, ...] = ()
    """Files of its folder that are not read."""

    def see(self, file: str, *, is_torn: bool) -> None:
        """Count a row that was read; `is_torn` is what stands for all that its file has lost."""
        if is_torn:
            self.torn[file] = self.files[file]
        self.files[file] += 1
        self.read += 1

    def leave_out(self, reason: str, file: str) -> None:
        """Count a row that goes into quarantine."""
        self.reasons[reason] += 1
        self.files_left_out[file] += 1

    def accept(self, tokens: int, loss_tokens: int) -> None:
        """Count one sample."""
        self.samples += 1
        self.tokens += tokens
        self.loss_tokens += loss_tokens

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
            "samples": self.samples,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            **self._files(),
        }

    def _files(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if 1 < len(self.files) <= _MOST_FILES:
            told["files"] = {
                name: {"read": read, "quarantined": self.files_left_out[name]}
                for name, read in self.files.items()
            }
        if self.torn:
            told["torn"] = dict(self.torn)
        if self.unread:
            told["unread"] = list(self.unread[:_MOST_FILES])
        return told

    def file_lines(self) -> Iterator[str]:
        """A line for each file, where there are several and not too many."""
        if not 1 < len(self.files) <= _TOLD_FILES:
            return
        for name, read in self.files.items():
            left_out = self.files_left_out[name]
            yield f"  {name}: read {read}" + (f", quarantined {left_out}" if left_out else "")


@dataclass(slots=True)
class Tally:
    """Counts of a whole run."""

    sources: list[SourceTally] = field(default_factory=list)
    samples: Counter[Split] = field(default_factory=Counter)
    tokens: Counter[Split] = field(default_factory=Counter)
    loss_tokens: Counter[Split] = field(default_factory=Counter)
    """Trainable tokens, after the cut to `corpus.max_length`."""
    notes: Counter[str] = field(default_factory=Counter)
    """What the policies of the recipe did to accepted rows, by name."""

    def accept(self, split: Split, tokens: int, loss_tokens: int) -> None:
        """Count one sample's tokens."""
        self.samples[split] += 1
        self.tokens[split] += tokens
        self.loss_tokens[split] += loss_tokens

    @property
    def truncated(self) -> int:
        """Samples that were cut to `corpus.max_length`."""
        return self.notes["cut_to_max_length"]

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
            "notes": dict(sorted((+self.notes).items())),
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        for source in self.sources:
            yield f"{source.name}: {source.line()}"
            for reason, count in source.reasons.most_common():
                yield f"  {count} {reason}"
            yield from source.file_lines()
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
        for name, count in sorted((+self.notes).items()):
            yield f"{count} {_in_words(name)}"


_WORDS = {
    "answers_left_out_duplicate": "answers of accepted rows were left out: equal ones came before",
    "consecutive_roles_keep": "rows have two turns of one role in a row, and were kept so",
    "consecutive_roles_merge": "rows had two turns of one role in a row, which were joined",
    "cut_to_max_length": "samples were cut to corpus.max_length",
    "leading_assistant_context_only": "rows begin with an assistant turn, which is not trained on",
    "leading_assistant_keep": "rows begin with an assistant turn, which is trained on",
    "loops_keep": "samples have an answer that goes round in circles (corpus.on_loop)",
    "reasoning_not_rendered": "answers have reasoning that the chat template leaves out",
    "same_prompt_keep": "rows have a prompt that came before, with another answer",
    "tools_not_rendered": "rows have tools that the chat template leaves out",
}


def _in_words(note: str) -> str:
    left_out = note.removeprefix("answers_left_out_")
    return _WORDS.get(note, f"answers of accepted rows were left out: {left_out}")


def unread_words(source: str, names: Sequence[str]) -> str:
    """Which files of a folder are not read, and why, in a sentence without its full stop."""
    listed = ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
    )
    verb = "file is" if len(names) == 1 else "files are"
    return (
        f"{len(names)} {verb} not read in {source}: {listed}. A folder stands for its files of "
        "rows; text counts where there are none, or as a source of its own"
    )
