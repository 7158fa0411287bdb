"""A worker's units, put together from a foreign cache instead of captured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.durable.errors import DataError
from paceline.extract.foreign_files import (
    NOT_FINITE,
    OTHER_FORMAT,
    ForeignSample,
    Kind,
    Unreadable,
    read_sample,
)
from paceline.extract.foreign_layers import Meaning, Selection, chosen
from paceline.extract.layout import Layout
from paceline.features.shard import write_shard
from paceline.flow.units import CAPTURING, LOADING, Made, Task, WorkerContext
from paceline.target.head import TargetHead
from paceline.types import Features, TokenBatch
from paceline.types.rows import read_rows
from paceline.types.sample import batch_of


@dataclass(frozen=True, kw_only=True)
class ForeignJob:
    """What holds for every unit."""

    corpus: Path
    fingerprint: str
    layout: Layout
    kind: Kind
    meaning: Meaning
    pick: Selection
    target: Path
    compute: str
    """The target's compute type by name: a last state is normed in it."""


@dataclass(frozen=True)
class ForeignUnit:
    """The payload of a unit's task."""

    positions: tuple[int, ...]
    """Where the samples' lines begin in the corpus, in the order of the shard's rows."""

    files: tuple[Path, ...]
    """The file that holds each."""


class ForeignMaker:
    """Makes a unit when it is called; see `open_foreign_maker`."""

    def __init__(self, job: ForeignJob, context: WorkerContext) -> None:
        self._job, self._context = job, context
        context.state(LOADING)
        self._head: TargetHead | None = None
        if job.pick.last and not job.pick.is_normed:
            compute = getattr(torch, job.compute)
            self._head = TargetHead.load(job.target, dtype=compute, device="cpu")

    def __call__(self, task: Task, path: Path) -> Made:
        """Read the task's samples from their files and write their shard at `path`."""
        self._context.state(CAPTURING)
        unit: ForeignUnit = task.payload
        with self._context.watch.call("read corpus", self._job.corpus):
            tokens = batch_of(read_rows(self._job.corpus, unit.positions))
        features = self._features(tokens, unit.files)
        with self._context.watch.call("write shard", path):
            stat = write_shard(
                path,
                features,
                fingerprint=self._job.fingerprint,
                codec=self._job.layout.codec,
                fs=self._context.fs,
            )
        return Made(stat)

    def _features(self, tokens: TokenBatch, files: Sequence[Path]) -> Features:
        layout = self._job.layout
        total, width = tokens.input_ids.numel(), layout.hidden_size
        dtype = getattr(torch, layout.dtype)
        features = Features(
            tokens=tokens,
            taps=torch.empty(total, len(layout.layer_ids), width, dtype=dtype),
            last=torch.empty(total, width, dtype=dtype) if layout.last else None,
            layer_ids=layout.layer_ids,
        )
        bounds = tokens.offsets.tolist()
        for file, start, end in zip(files, bounds, bounds[1:], strict=False):
            try:
                with self._context.watch.call("read cache", file):
                    self._take(features, slice(start, end), file)
            except Unreadable as error:
                raise DataError(f"{file}: {error}") from error
        return features

    def _take(self, features: Features, rows: slice, file: Path) -> None:
        job, ids = self._job, features.tokens.input_ids[rows]
        sample = read_sample(file, job.kind, job.layout.hidden_size, verify=True)
        _require_ids(sample, ids)
        if sample.shape != job.meaning.shape:
            raise Unreadable(OTHER_FORMAT, "it has other states than when it was looked at")
        slot = 0
        for name, states in chosen(sample, job.meaning, job.pick, len(ids)):
            if name == "last":
                assert features.last is not None
                features.last[rows] = self._normed(states)
                _require_finite(features.last[rows])
                continue
            features.taps[rows, slot] = states.to(features.taps.dtype)
            slot += 1
        _require_finite(features.taps[rows])

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self._job.layout.dtype)
        if self._head is None:
            return states.to(dtype)
        return self._head.norm(states.to(self._head.norm_weight.dtype)).to(dtype)


def open_foreign_maker(job: ForeignJob, context: WorkerContext) -> ForeignMaker:
    """The setup of a worker (`flow.supervisor.supervise`) that imports."""
    return ForeignMaker(job, context)


def _require_ids(sample: ForeignSample, ids: torch.Tensor) -> None:
    found = torch.from_numpy(sample.input_ids)
    # Behind the sample there may be padding, which causal attention does not let it see.
    if len(found) < len(ids) or not torch.equal(found[: len(ids)], ids) or found[len(ids) :].any():
        raise Unreadable(OTHER_FORMAT, "it has other token ids than when it was looked at")


def _require_finite(states: torch.Tensor) -> None:
    # A sum is infinite or no number where a term is, and costs a tenth of looking at each.
    if not bool(torch.isfinite(states.float().sum())) and not bool(torch.isfinite(states).all()):
        raise Unreadable(NOT_FINITE, "the tool that wrote it computed in too narrow a type")
