"""What a worker process does: capture a unit with the target and write its shard."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.durable.errors import TargetError
from paceline.durable.store import LocalStore, Stat
from paceline.extract.rows import read_rows
from paceline.features.shard import write_shard
from paceline.features.sizes import RestDtype
from paceline.recipe.schema import TargetRecipe
from paceline.target.check import self_check
from paceline.target.load import Target, load_target
from paceline.types import Features, TokenBatch
from paceline.types.sample import batch_of


@dataclass(frozen=True)
class Job:
    """What holds for every unit."""

    target: TargetRecipe
    corpus: Path
    store: Path
    layer_ids: tuple[int, ...]
    last: bool
    dtype: RestDtype
    fingerprint: str
    check_positions: tuple[int, ...]
    """Lines of the samples on which the target is checked before the first unit."""


@dataclass(frozen=True)
class UnitTask:
    """One unit."""

    index: int
    key: str
    positions: tuple[int, ...]
    """Where the samples' lines begin, in the order of the shard's rows."""

    batches: tuple[int, ...]
    """Samples of each forward pass, one after the other in that order."""

    def __repr__(self) -> str:
        return f"{self.key}, {len(self.positions)} samples"


@dataclass(frozen=True)
class UnitDone:
    """A shard that is whole, durable and read back."""

    stat: Stat
    timed_tokens: int
    """Tokens that went into the rate: all but those of a worker's first forward pass."""

    seconds: float
    """What those took, writing included."""


def open_worker(job: Job) -> Callable[[UnitTask], UnitDone]:
    """Load the target, prove that it is captured right, and return the handler of a unit.

    The handler raises TargetError for hidden states that are not finite and for token ids
    processed that are not those asked for, and whatever `write_shard` raises.
    """
    target = load_target(job.target)
    self_check(target, batch_of(read_rows(job.corpus, job.check_positions)), job.layer_ids)
    return _Worker(target, job)


class _Worker:
    def __init__(self, target: Target, job: Job) -> None:
        self._target = target
        self._job = job
        self._store = LocalStore(job.store)
        self._is_warm = False

    def __call__(self, task: UnitTask) -> UnitDone:
        started, timed_from = time.perf_counter(), 0
        tokens = batch_of(read_rows(self._job.corpus, task.positions))
        unit = _empty(tokens, self._target.spec.hidden_size, self._job)
        first = 0
        for count in task.batches:
            self._capture_into(unit, first, first + count)
            first += count
            if not self._is_warm:
                self._is_warm = True
                started, timed_from = time.perf_counter(), int(tokens.offsets[first])
        stat = write_shard(self._store.path(task.key), unit, fingerprint=self._job.fingerprint)
        seconds = time.perf_counter() - started
        return UnitDone(stat, tokens.input_ids.numel() - timed_from, seconds)

    def _capture_into(self, unit: Features, first: int, stop: int) -> None:
        """Capture samples [first, stop) and convert them straight into their place."""
        batch, rows = _part(unit.tokens, first, stop)
        found = self._target.capture(batch, self._job.layer_ids, last=self._job.last)
        if not torch.equal(found.tokens.input_ids, batch.input_ids):
            raise TargetError(
                f"the target processed other token ids than it was given, in a batch that begins "
                f"with sample {batch.sample_ids[0]}."
            )
        unit.taps[rows] = found.taps
        if unit.last is not None and found.last is not None:
            unit.last[rows] = found.last
        self._check_finite(unit, batch, rows)

    def _check_finite(self, unit: Features, batch: TokenBatch, rows: slice) -> None:
        for states in (unit.taps, unit.last):
            if states is None or bool(torch.isfinite(states[rows]).all()):
                continue
            good = torch.isfinite(states[rows]).flatten(1).all(dim=1)
            token = int(good.logical_not().nonzero()[0])
            sample = int(torch.searchsorted(batch.offsets, token, right=True)) - 1
            raise TargetError(
                f"sample {batch.sample_ids[sample]}: the target's hidden states are not finite in "
                f"{self._job.target.dtype}. Set target.dtype to a type of wider range, or leave "
                "the sample out of the corpus."
            )


def _empty(tokens: TokenBatch, hidden_size: int, job: Job) -> Features:
    total = tokens.input_ids.numel()
    dtype = getattr(torch, job.dtype)
    return Features(
        tokens=tokens,
        taps=torch.empty(total, len(job.layer_ids), hidden_size, dtype=dtype),
        last=torch.empty(total, hidden_size, dtype=dtype) if job.last else None,
        layer_ids=job.layer_ids,
    )


def _part(tokens: TokenBatch, first: int, stop: int) -> tuple[TokenBatch, slice]:
    """Samples [first, stop) as a batch of their own, and their rows."""
    rows = slice(int(tokens.offsets[first]), int(tokens.offsets[stop]))
    batch = TokenBatch(
        input_ids=tokens.input_ids[rows],
        loss_mask=tokens.loss_mask[rows],
        offsets=tokens.offsets[first : stop + 1] - rows.start,
        sample_ids=tokens.sample_ids[first:stop],
    )
    return batch, rows
