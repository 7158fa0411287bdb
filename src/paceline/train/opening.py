"""How a training is put together: its drafters, and what their features come from."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.drafter.dflash import DFlash
from paceline.drafter.memory import checkpoint_bytes, unaveraged_bytes
from paceline.drafter.shape import DrafterShape
from paceline.features.manifest import Manifest
from paceline.flow.channel import Channel
from paceline.flow.remote import RemotePolicy
from paceline.recipe.objective_inputs import needs_all_tokens
from paceline.recipe.online import capture_devices, training_devices
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.target.head import TargetHead
from paceline.target.spec import read_spec
from paceline.train.agenda import Agenda
from paceline.train.averaged import AveragedTeam
from paceline.train.averaging import trainable
from paceline.train.capture import CaptureJob
from paceline.train.checkpoint import restore_optimizer, restore_random
from paceline.train.compute import compute_dtype
from paceline.train.crew import Crew, Solo
from paceline.train.data import TrainData
from paceline.train.drafter_worker import DrafterJob
from paceline.train.fed import Fed
from paceline.train.memory import LOADING, Demand, Meter, tell_prediction
from paceline.train.online import captured_features
from paceline.train.reduced import ReducedTeam
from paceline.train.sides import Sides
from paceline.train.source import stored_features
from paceline.train.tee import TeePlace, open_tee
from paceline.watch.events import EventWriter
from paceline.watch.words import counted

_CHECK_SAMPLES = 4

_CHECKPOINTS = 2
"""That the disk has room for, whatever else is kept there."""


class Told:
    """Takes what workers' processes tell, as events; for any thread."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._deaths: list[str] = []

    def __call__(self, kind: Any, fields: dict[str, Any]) -> None:
        """`kind` is one of `events.Kind`."""
        if kind == "worker" and fields.get("what") == "died":
            self._deaths.append(str(fields.get("name")))
        told = {("worker_pid" if key == "pid" else key): value for key, value in fields.items()}
        self._events.emit(kind, **told)

    @property
    def deaths(self) -> dict[str, int]:
        """Of each worker that has died, by its name."""
        return dict(sorted(Counter(self._deaths).items()))

    def sentence(self) -> str:
        """Which died; empty where none did."""
        deaths = ", ".join(f"{name} {counted(n, 'time')}" for name, n in self.deaths.items())
        return f"workers died, and others or new ones did their work: {deaths}" if deaths else ""


@contextmanager
def open_crew(
    recipe: Recipe, data: TrainData, drafter: DFlash, start: Path | None, told: Told
) -> Iterator[Crew]:
    """The drafters, ready to go on from `start` where there is one.

    `drafter` is what they begin with; one alone is trained itself, on the recipe's device.
    """
    train = recipe.train
    demand = demand_of(recipe, data)
    devices = training_devices(train)
    predicted = {name: demand.parts(train, drafter.config, name) for name in devices}
    tell_prediction(predicted)
    if train.drafter_devices:
        own = trainable(drafter)
        kind = AveragedTeam if train.sync == "average" else ReducedTeam
        team = kind(
            DrafterJob(
                recipe=train,
                target=Path(recipe.target.path),
                config=drafter.config,
                buffers={n: t for n, t in drafter.state_dict().items() if n not in own},
                stored=data.stored,
                demand=demand,
            ),
            drafter,
            devices=train.drafter_devices,
            distinct=data.num_train,
            start=start,
            policy=RemotePolicy(threads=train.threads),
            report=told,
        )
        with team.at_work():
            yield team
        return
    device = torch.device(train.device)
    torch.set_num_threads(train.threads)
    meter = Meter(device, parts=predicted[train.device])
    with meter.phase(LOADING):
        head = drafter.narrowed(
            TargetHead.load(Path(recipe.target.path), dtype=compute_dtype(train), device=device),
            keep_whole=needs_all_tokens(train),
        )
        solo = Solo(train, drafter, head, distinct=data.num_train, meter=meter)
        if start is not None:
            restore_optimizer(start, solo.learner.optimizer)
            restore_random(start, device)
    yield solo


def demand_of(recipe: Recipe, data: TrainData) -> Demand:
    """What the memory of this training follows from."""
    spec = read_spec(Path(recipe.target.path), identify=False)
    longest = np.asarray(data.tokens)[np.asarray(data.order.indices)].max()
    return Demand(longest=int(longest), is_tied=spec.tie_word_embeddings)


@contextmanager
def open_feed(
    recipe: Recipe,
    run_dir: RunDir,
    data: TrainData,
    manifest: Manifest,
    agenda: Agenda,
    sides: Sides,
    told: Told,
    *,
    shape: DrafterShape,
) -> Iterator[Channel[Fed]]:
    """The channel that the samples of `agenda` come through, which `sides` then watches.

    What is kept leaves the disk room for checkpoints of a drafter of this `shape`.
    """
    train = recipe.train
    if data.captured is None:
        with (
            stored_features(data.stored, agenda, data.order, train.queue_bytes) as channel,
            sides.watching(channel),
        ):
            yield channel
        return
    job = CaptureJob(
        target=recipe.target,
        identity=manifest.target_identity,
        corpus=run_dir.samples(recipe),
        layer_ids=manifest.layer_ids,
        last=manifest.last,
        dtype=recipe.extract.dtype,
        chunk_tokens=recipe.extract.chunk_tokens,
        check_positions=tuple(data.captured.lines[:_CHECK_SAMPLES].tolist()),
    )
    place = TeePlace(
        folder=run_dir.tee,
        fingerprint=manifest.fingerprint,
        codec=manifest.codec,
        shard_bytes=recipe.extract.shard_bytes,
        waiting_bytes=train.queue_bytes,
        reserve=_CHECKPOINTS * checkpoint_bytes(train, shape) + unaveraged_bytes(train, shape),
    )
    with (
        open_tee(place, data.captured.ids) if train.tee else nullcontext() as tee,
        captured_features(
            job,
            data.captured,
            agenda,
            devices=capture_devices(recipe),
            queue_bytes=train.queue_bytes,
            policy=RemotePolicy(threads=recipe.target.threads),
            report=told,
            tee=tee,
        ) as (channel, side),
        sides.watching(channel, side.meters, tee),
    ):
        yield channel
