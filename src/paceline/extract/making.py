"""A worker's units: captured with the target, converted, and written as shards."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from paceline.durable.errors import TargetError
from paceline.durable.open_store import open_store
from paceline.extract.job import Job, Rechecked, UnitTimes, UnitWork
from paceline.extract.recheck import recheck
from paceline.features.shard import write_shard
from paceline.flow.units import CAPTURING, LOADING, Made, Task, WorkerContext
from paceline.target.capture import CapturePlan, PendingFeatures
from paceline.target.check import self_check
from paceline.target.compile_cache import use_compile_cache
from paceline.target.load import Target, load_target
from paceline.target.sound import require_sound
from paceline.target.transfer import HostCopies
from paceline.types import Features, TokenBatch
from paceline.types.rows import read_rows
from paceline.types.sample import batch_of

_WARMING = "warming"

_SLACK = 300.0
"""Seconds that the target may take to be loaded, or for a forward pass, before that is told as a
call that does not return; a thread that the kernel holds in it is told without."""

_ShapeClass = tuple[int, int, bool]
"""Powers of two of samples and tokens of a forward pass, and whether it goes in pieces: kernels
are made or chosen anew for a shape of another class."""


class UnitMaker:
    """Makes a unit when it is called; see `open_worker`."""

    def __init__(self, job: Job, context: WorkerContext) -> None:
        self._job = job
        self._context = context
        context.state(LOADING)
        if job.compile_cache is not None:
            with context.watch.call("open compile cache", job.compile_cache):
                use_compile_cache(job.compile_cache)
        with self._target_call("load target"):
            self._target = load_target(job.target, around=self._reading)
        _require_identity(self._target, job)
        self._plan = CapturePlan(
            job.layer_ids, job.last, job.chunk_tokens, getattr(torch, job.dtype)
        )
        sample = self._read(job.check_positions)
        with self._target_call("check target"):
            self_check(self._target, sample, job.layer_ids, chunk_tokens=job.chunk_tokens)
        self._rechecked = self._recheck()
        self._copies = HostCopies(self._target.device)
        self._warm: set[_ShapeClass] = set()

    def __call__(self, task: Task, path: Path) -> Made:
        """Capture the task's samples and write their shard at `path`."""
        self._context.state(CAPTURING)
        work: UnitWork = task.payload
        copies_before = self._copies.count
        started = time.perf_counter()
        unit = _UnitFeatures(self._read(work.positions), self._target, self._job)
        read = time.perf_counter()
        warm_tokens, warmed, warm_seconds = self._capture(unit, work.batches)
        captured = time.perf_counter()
        with self._context.watch.call("write shard", path):
            stat = write_shard(
                path,
                unit.features,
                fingerprint=self._job.fingerprint,
                codec=self._job.codec,
                fs=self._context.fs,
            )
        around = read - started + time.perf_counter() - captured
        tokens = unit.features.tokens.input_ids.numel()
        timed = tokens - warm_tokens
        times = UnitTimes(
            samples=unit.captured,
            timed_tokens=timed,
            # Reading and writing belong to all tokens alike.
            seconds=(captured - read - warm_seconds) + around * timed / tokens if timed else 0.0,
            warmed=warmed,
            warm_up_seconds=warm_seconds,
            copies=self._copies.count - copies_before,
            rechecked=tuple(self._rechecked),
        )
        self._rechecked = ()
        return Made(stat, times)

    def _capture(self, unit: "_UnitFeatures", batches: Sequence[int]) -> tuple[int, int, float]:
        """Capture every batch. Returns tokens, number and seconds of those that warmed up."""
        tokens, warmed, seconds = 0, 0, 0.0
        first = 0
        pending: _Pending | None = None
        for count in batches:
            batch, rows = _part(unit.features.tokens, first, first + count)
            first += count
            kind = self._shape_class(batch)
            if kind in self._warm:
                # The device begins with this batch before the last one is dealt with here.
                following = self._start(batch, rows)
                unit.take(pending)
                pending = following
                continue
            unit.take(pending)
            pending = None
            self._context.state(_WARMING)
            started = time.perf_counter()
            unit.take(self._start(batch, rows))
            seconds += time.perf_counter() - started
            tokens += batch.input_ids.numel()
            warmed += 1
            self._warm.add(kind)
            self._context.state(CAPTURING)
        unit.take(pending)
        return tokens, warmed, seconds

    def _start(self, batch: TokenBatch, rows: slice) -> "_Pending":
        with self._target_call("run target"):
            features = self._target.start_capture(batch, self._plan, self._copies)
        return _Pending(batch, rows, features)

    def _target_call(self, what: str) -> AbstractContextManager[None]:
        """Weights may lie on a mount until they are used: each use of them can hang."""
        return self._context.watch.call(what, self._job.target.path, slack=_SLACK)

    def _reading(self) -> AbstractContextManager[None]:
        return self._context.watch.call("read target", self._job.target.path)

    def _shape_class(self, batch: TokenBatch) -> _ShapeClass:
        longest, chunk = max(batch.lengths), self._job.chunk_tokens
        in_pieces = chunk is not None and longest > chunk
        return (len(batch) - 1).bit_length(), (longest - 1).bit_length(), in_pieces

    def _read(self, positions: Sequence[int]) -> TokenBatch:
        with self._context.watch.call("read corpus", self._job.corpus):
            return batch_of(read_rows(self._job.corpus, positions))

    def _recheck(self) -> Sequence[Rechecked]:
        if not self._job.rechecks:
            return ()
        with self._context.watch.call("open store", self._job.store):
            store = open_store(self._job.store, self._job.store_options)
        return recheck(self._target, self._plan, self._job, store, self._context.watch)


class _Pending:
    """A batch that is on the device, or on its way from there."""

    def __init__(self, batch: TokenBatch, rows: slice, features: PendingFeatures) -> None:
        self.batch = batch
        self.rows = rows
        self.features = features


class _UnitFeatures:
    """The features of a unit, filled batch by batch in the type at rest."""

    def __init__(self, tokens: TokenBatch, target: Target, job: Job) -> None:
        self._compute_type = job.target.dtype
        self.captured = 0
        """Samples taken so far."""
        total, width = tokens.input_ids.numel(), target.spec.hidden_size
        dtype = getattr(torch, job.dtype)
        self.features = Features(
            tokens=tokens,
            taps=torch.empty(total, len(job.layer_ids), width, dtype=dtype),
            last=torch.empty(total, width, dtype=dtype) if job.last else None,
            layer_ids=job.layer_ids,
        )

    def take(self, pending: _Pending | None) -> None:
        """Wait for a batch and put its states where they belong; None is nothing."""
        if pending is None:
            return
        found, batch, rows = pending.features.wait(), pending.batch, pending.rows
        self.captured += len(found.tokens)
        require_sound(found, batch, self._compute_type)
        self.features.taps[rows] = found.taps
        if self.features.last is not None and found.last is not None:
            self.features.last[rows] = found.last


def _require_identity(target: Target, job: Job) -> None:
    if target.spec.identity != job.identity:
        raise TargetError(
            f"{job.target.path}: its identity is {target.spec.identity}, but this extraction was "
            f"planned with {job.identity}. The target was changed meanwhile: put it back, or use "
            "a new run directory (`--run DIR`)."
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
