"""A sample at rest: one JSON line of the corpus."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.durable.errors import DataError

if TYPE_CHECKING:
    import torch

    from paceline.types.batch import TokenBatch


class Split(StrEnum):
    """What a sample is used for."""

    TRAIN = "train"
    VALIDATION = "validation"
    """Held out of training; measured at every evaluation; chooses the checkpoint."""
    HELDOUT = "heldout"
    """Held out of everything but the score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A conversation as the target sees it."""

    sample_id: str
    """Hash of messages, tools, template with arguments and tokenizer: 32 hex digits."""

    prompt_id: str
    """Hash of the prompt's turns and tools; regeneration keeps it."""

    source: str
    """Name of the data set the row came from."""

    split: Split
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    input_ids: list[int]
    loss_spans: list[tuple[int, int]]
    """Half-open token ranges that the target generated; empty for a prompt without an answer."""

    finish: str | None = None
    """How generation ended, of regenerated answers: `stop` or `length`."""

    @property
    def num_loss_tokens(self) -> int:
        """Trainable tokens."""
        return sum(end - start for start, end in self.loss_spans)

    def loss_mask(self) -> "torch.Tensor":
        """Bool [len(input_ids)], true inside `loss_spans`."""
        # Loaded by those who ask for tensors: whoever only counts samples does without.
        import torch

        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


def encode_sample(sample: Sample) -> bytes:
    """One JSON line, newline included; equal samples give equal bytes."""
    return msgspec.json.encode(sample, order="deterministic") + b"\n"


def read_samples(path: Path) -> Iterator[Sample]:
    """Stream the samples of a corpus file in order. Raises DataError naming file and line."""
    decoder = msgspec.json.Decoder(Sample)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise DataError(
                    f"{path}, line {number}: not a sample ({error}). The file was damaged after "
                    "it was written: remove the stage's folder and run the stage again."
                ) from error


def batch_of(samples: Iterable[Sample]) -> "TokenBatch":
    """Concatenate samples into one ragged batch on the CPU."""
    import torch

    from paceline.types.batch import TokenBatch

    rows: Sequence[Sample] = list(samples)
    lengths = torch.tensor([0, *(len(s.input_ids) for s in rows)], dtype=torch.int64)
    return TokenBatch(
        input_ids=torch.tensor([i for s in rows for i in s.input_ids], dtype=torch.int64),
        loss_mask=torch.cat([s.loss_mask() for s in rows]),
        offsets=lengths.cumsum(0),
        sample_ids=tuple(s.sample_id for s in rows),
    )
