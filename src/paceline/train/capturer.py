"""The worker process that captures samples for an online training when asked."""

import time
from collections.abc import Sequence

import torch

from paceline.durable.errors import TargetError
from paceline.flow.parcel import Parcel, allow_many_parcels, into_parcel
from paceline.flow.units import LOADING, WorkerContext
from paceline.target.capture import CapturePlan
from paceline.target.check import self_check
from paceline.target.load import load_target
from paceline.target.sound import require_sound
from paceline.target.transfer import HostCopies
from paceline.train.capture import CaptureBatch, Captured, CaptureJob
from paceline.types import Features, TokenBatch
from paceline.types.rows import read_rows
from paceline.types.sample import batch_of

_SLACK = 300.0
"""Seconds that the target may take to be loaded, or for a forward pass, before that is told as a
call that does not return."""


class Capturer:
    """Answers `CaptureBatch` with `Captured`.

    Who asks opens the parcels of an answer before it asks again: they are let go of then.
    """

    def __init__(self, job: CaptureJob, context: WorkerContext) -> None:
        self._job, self._watch = job, context.watch
        context.state(LOADING)
        allow_many_parcels()
        with self._watch.call("load target", job.target.path, slack=_SLACK):
            self._target = load_target(job.target)
        if self._target.spec.identity != job.identity:
            raise TargetError(
                f"{job.target.path}: its identity is {self._target.spec.identity}, but this "
                f"training began with {job.identity}. The files changed: put them back."
            )
        sample = self._read(job.check_positions)
        with self._watch.call("check target", job.target.path, slack=_SLACK):
            self_check(self._target, sample, job.layer_ids, chunk_tokens=job.chunk_tokens)
        self._plan = CapturePlan(
            job.layer_ids, job.last, job.chunk_tokens, getattr(torch, job.dtype)
        )
        self._given: list[Parcel] = []

    def __call__(self, request: CaptureBatch, _path: None) -> Captured:
        """Capture a batch. Raises TargetError for states that are not finite, naming the sample."""
        # Who asks again has opened the parcels of the last answer.
        for parcel in self._given:
            parcel.close()
        self._given = []
        started = time.perf_counter()
        batch = self._read(request.lines)
        with self._watch.call("run target", self._job.target.path, slack=_SLACK):
            features = self._captured(batch)
        handles = []
        for sample in split_samples(features):
            parcel, handle = into_parcel(sample)
            self._given.append(parcel)
            handles.append(handle)
        return Captured(tuple(handles), time.perf_counter() - started)

    def _captured(self, batch: TokenBatch) -> Features:
        copies = HostCopies(self._target.device)
        features = self._target.start_capture(batch, self._plan, copies).wait()
        require_sound(features, batch, self._job.target.dtype)
        return features

    def _read(self, lines: Sequence[int]) -> TokenBatch:
        with self._watch.call("read corpus", self._job.corpus):
            return batch_of(read_rows(self._job.corpus, lines))


def split_samples(features: Features) -> list[Features]:
    """One Features for each sample of a batch, as views."""
    bounds = features.tokens.offsets.tolist()
    found = []
    for number, sample_id in enumerate(features.tokens.sample_ids):
        rows = slice(bounds[number], bounds[number + 1])
        tokens = TokenBatch(
            input_ids=features.tokens.input_ids[rows].clone(),
            loss_mask=features.tokens.loss_mask[rows].clone(),
            offsets=torch.tensor([0, rows.stop - rows.start]),
            sample_ids=(sample_id,),
        )
        last = None if features.last is None else features.last[rows]
        found.append(Features(tokens, features.taps[rows], last, features.layer_ids))
    return found
