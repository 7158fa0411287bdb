"""A drafter's part of a training with several of them: a worker process that does what is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.durable.fs import write_atomic
from paceline.features.reader import FeatureReader
from paceline.flow.parcel import FeatureHandle, Handle, Parcel, allow_many_parcels
from paceline.flow.units import LOADING, WorkerContext
from paceline.recipe.objective_inputs import needs_all_tokens
from paceline.recipe.schema import TrainRecipe
from paceline.target.head import TargetHead
from paceline.train.averaging import give_weights, take_weights, weights_in
from paceline.train.batch import anchor_sample
from paceline.train.checkpoint import (
    OPTIMIZER,
    RNG,
    optimizer_tensors,
    own_file,
    restore_optimizer,
    restore_random,
)
from paceline.train.compute import compute_dtype, computing
from paceline.train.evaluate import Depths, depths_at_anchors
from paceline.train.learner import Learner, StepResult
from paceline.train.memory import AVERAGE, EVALUATION, SAVING, Demand, Meter
from paceline.train.memory import LOADING as LOADING_TENSORS
from paceline.train.peers import Peers, ProcessGroup
from paceline.train.rng import rng_state
from paceline.train.source import StoredFeatures


@dataclass(frozen=True, kw_only=True)
class DrafterJob:
    """What holds for a whole training; can be pickled."""

    recipe: TrainRecipe
    """Its device is the worker's own."""
    target: Path
    """Folder of the target, for embedding and lm_head."""
    config: DrafterConfig
    buffers: dict[str, torch.Tensor]
    """What the drafter holds beside its trainable tensors, by name."""
    stored: StoredFeatures
    """Where the validation samples are."""
    demand: Demand
    """What its memory follows from."""
    place: str = ""
    """What the recipe calls the worker's device, which has another name in its process."""


@dataclass(frozen=True)
class Begin:
    """Take weights, and an optimizer's state where there is one."""

    weights: Handle
    checkpoint: Path | None
    number: int
    """Of the drafter's own files in that checkpoint."""


@dataclass(frozen=True)
class Learn:
    """Do one optimizer step."""

    samples: tuple[FeatureHandle, ...]
    epochs: tuple[int, ...]
    """Of each sample."""
    rate: float
    progress: float
    """Share of the training's samples consumed."""


@dataclass(frozen=True)
class Join:
    """From now on take every step with the others: sums over all of them."""

    port: int
    rank: int
    world: int
    name: str
    """Of the group; another one after each start."""


@dataclass(frozen=True)
class Give:
    """Hand over all weights."""


@dataclass(frozen=True)
class Given:
    """The answer to it; open it before anything else is asked."""

    weights: Handle
    is_finite: bool


@dataclass(frozen=True)
class Save:
    """Write optimizer and generators into `folder`, durably; the groups' numbers are the answer."""

    folder: Path
    number: int


@dataclass(frozen=True)
class Take:
    """Replace all weights."""

    weights: Handle


@dataclass(frozen=True)
class Evaluate:
    """Find the accepted depths on these samples of the store; the answer is `Depths`."""

    indices: tuple[int, ...]


@dataclass(frozen=True)
class Peak:
    """Tell what was taken of the device; the answer is a `Use`."""


class DrafterWorker:
    """Answers the requests above."""

    def __init__(self, job: DrafterJob, context: WorkerContext) -> None:
        self._job, self._watch = job, context.watch
        context.state(LOADING)
        allow_many_parcels()
        recipe = job.recipe
        device = torch.device(recipe.device)
        torch.manual_seed(recipe.seed)
        parts = job.demand.parts(recipe, job.config, recipe.device)
        self._meter = Meter(device, name=job.place, parts=parts)
        with self._meter.phase(LOADING_TENSORS):
            drafter = DFlash(job.config)
            drafter.load_state_dict(job.buffers, strict=False)
            drafter = drafter.float().to(device)
            with self._watch.call("load head", job.target):
                head = TargetHead.load(job.target, dtype=compute_dtype(recipe), device=device)
            self._head = drafter.narrowed(head, keep_whole=needs_all_tokens(recipe))
            self._learner = Learner(recipe, drafter, self._head, self._meter)
        self._device = device
        self._peers: Peers | None = None
        self._given: Parcel | None = None
        self._reader: FeatureReader | None = None

    def __call__(self, request: Any, _path: None) -> Any:
        """Do what is asked."""
        if self._given is not None:
            self._given.close()
            self._given = None
        match request:
            case Begin(weights, checkpoint, number):
                with self._meter.phase(LOADING_TENSORS):
                    return self._begin(weights, checkpoint, number)
            case Join(port, rank, world, name):
                self._peers = ProcessGroup(
                    port, rank=rank, world=world, name=name, device=self._device
                )
                return None
            case Learn():
                return self._learn(request)
            case Give():
                with self._meter.phase(AVERAGE):
                    return self._give()
            case Take(weights):
                with self._meter.phase(AVERAGE):
                    return self._take(weights)
            case Save(folder, number):
                with self._meter.phase(SAVING):
                    return self._save(folder, number)
            case Evaluate(indices):
                with self._meter.phase(EVALUATION):
                    return self._evaluate(indices)
            case Peak():
                return self._meter.use()
        raise ValueError(f"a drafter was asked for {request!r}")

    def _begin(self, weights: Handle, checkpoint: Path | None, number: int) -> None:
        self._take(weights)
        if checkpoint is not None:
            restore_optimizer(checkpoint, self._learner.optimizer, number)
            restore_random(checkpoint, self._device, number)

    def _learn(self, request: Learn) -> StepResult:
        recipe = self._job.recipe
        parcels = [Parcel.opened(handle.parcel) for handle in request.samples]
        try:
            samples = [
                anchor_sample(
                    handle.over(parcel), count=recipe.anchors, seed=recipe.seed, epoch=epoch
                )
                for handle, parcel, epoch in zip(
                    request.samples, parcels, request.epochs, strict=True
                )
            ]
            return self._learner.learn(samples, request.rate, request.progress, peers=self._peers)
        finally:
            for parcel in parcels:
                parcel.close()

    def _give(self) -> Given:
        self._given, is_finite = give_weights(self._learner.drafter)
        return Given(self._given.handle, is_finite)

    def _take(self, weights: Handle) -> None:
        parcel = Parcel.opened(weights)
        try:
            drafter = self._learner.drafter
            take_weights(drafter, weights_in(parcel, drafter))
        finally:
            parcel.close()

    def _save(self, folder: Path, number: int) -> list[dict[str, Any]]:
        tensors, groups = optimizer_tensors(self._learner.optimizer)
        write_atomic(folder / own_file(OPTIMIZER, number), save(tensors))
        write_atomic(folder / own_file(RNG, number), save(rng_state(self._device)))
        return groups

    def _evaluate(self, indices: tuple[int, ...]) -> Depths:
        recipe = self._job.recipe
        if self._reader is None:
            self._reader = self._job.stored.open()
        with computing(self._learner.drafter, compute_dtype(recipe)):
            return depths_at_anchors(
                self._learner.drafter,
                self._head,
                self._reader,
                indices,
                anchors=recipe.eval_anchors,
                seed=recipe.seed,
            )


def open_drafter(job: DrafterJob, context: WorkerContext) -> DrafterWorker:
    """The setup of a drafter's worker."""
    return DrafterWorker(job, context)
