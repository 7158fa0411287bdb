"""How a training is put together: its drafters, and what their features come from."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.drafter.dflash import DFlash
from paceline.features.manifest import Manifest
from paceline.flow.balance import starvation
from paceline.flow.channel import Channel, Meters
from paceline.flow.remote import RemotePolicy
from paceline.recipe.objective_inputs import needs_all_tokens
from paceline.recipe.online import training_devices
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
from paceline.train.source import stored_features
from paceline.watch.events import EventWriter

_CHECK_SAMPLES = 4


@dataclass
class Sides:
    """How long the sides of the channel waited for each other."""

    targets: int
    drafters: int
    meters: Meters | None = None
    seconds: float = 0.0
    target_rate: float | None = None
    """Tokens per second of one target that never waits."""
    tokens: int = 0
    """That the drafters have consumed."""

    @property
    def drafter_rate(self) -> float | None:
        """Tokens per second of one drafter that never waits."""
        if self.meters is None:
            return None
        seconds = self.seconds * self.drafters - self.meters.lease_wait
        return self.tokens / seconds if self.tokens and seconds > 0 else None

    def sentence(self) -> str | None:
        """Which side starves, and what helps."""
        if self.meters is None or not self.seconds:
            return None
        return starvation(
            self.meters.lease_wait / self.seconds / self.drafters,
            self.meters.put_wait / self.seconds / self.targets,
            targets=self.targets,
            drafters=self.drafters,
        )

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        if self.meters is None:
            return {}
        return {
            "queue_peak_bytes": self.meters.peak_bytes,
            "drafters_waited": round(self.meters.lease_wait, 1),
            "targets_waited": round(self.meters.put_wait, 1),
            "target_rate": self.target_rate and round(self.target_rate, 1),
            "drafter_rate": self.drafter_rate and round(self.drafter_rate, 1),
        }


def report_to(events: EventWriter) -> Callable[[str, dict[str, Any]], None]:
    """What workers' processes tell, as events."""

    def report(kind: Any, fields: dict[str, Any]) -> None:
        told = {("worker_pid" if key == "pid" else key): value for key, value in fields.items()}
        events.emit(kind, **told)

    return report


@contextmanager
def open_crew(
    recipe: Recipe, data: TrainData, drafter: DFlash, start: Path | None, events: EventWriter
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
            report=report_to(events),
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


def sides_of(recipe: Recipe) -> Sides:
    """How many work on each side; without targets the one thread that reads the store."""
    train = recipe.train
    targets = max(1, len(train.target_devices)) if train.online else 1
    return Sides(targets=targets, drafters=max(1, len(train.drafter_devices)))


@contextmanager
def open_feed(
    recipe: Recipe,
    run_dir: RunDir,
    data: TrainData,
    manifest: Manifest,
    agenda: Agenda,
    sides: Sides,
    events: EventWriter,
) -> Iterator[Channel[Fed]]:
    """The channel that the samples of `agenda` come through; `sides` is filled in at its end."""
    train, started = recipe.train, time.monotonic()
    if data.captured is None:
        with stored_features(data.stored, agenda, data.order, train.queue_bytes) as channel:
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
    opened = captured_features(
        job,
        data.captured,
        agenda,
        devices=train.target_devices or (recipe.target.device,),
        queue_bytes=train.queue_bytes,
        policy=RemotePolicy(threads=recipe.target.threads),
        report=report_to(events),
    )
    with opened as (channel, side):
        try:
            yield channel
        finally:
            sides.meters, sides.seconds = channel.meters(), time.monotonic() - started
            sides.target_rate = side.meters.rate
