"""Whether those who make features and those who learn from them keep pace with each other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.flow.balance import starvation
from paceline.flow.channel import Channel, Meters
from paceline.recipe.online import capture_devices, training_devices
from paceline.recipe.schema import Recipe
from paceline.train.fed import Fed
from paceline.train.online import TargetMeters
from paceline.train.tee import Tee


@dataclass(frozen=True)
class _Watched:
    channel: Channel[Fed]
    target_meters: TargetMeters | None
    tee: Tee | None


class Sides:
    """The two sides of a training's channel, from `watching` on."""

    def __init__(self, *, targets: int, drafters: int) -> None:
        self._targets, self._drafters = targets, drafters
        self._watched: _Watched | None = None
        self._started = 0.0
        self._end: tuple[Meters, float] | None = None

    @contextmanager
    def watching(
        self,
        channel: Channel[Fed],
        target_meters: TargetMeters | None = None,
        tee: Tee | None = None,
    ) -> Iterator[None]:
        """Until its end, at which `tee` is closed."""
        self._watched = _Watched(channel, target_meters, tee)
        self._started = time.monotonic()
        try:
            yield
        finally:
            self._end = channel.meters(), time.monotonic() - self._started
            if tee is not None:
                # What it writes last counts too.
                tee.close()

    def now(self, tokens: int) -> dict[str, Any]:
        """For events; `tokens` are those that the drafters have consumed since `watching`."""
        meters, seconds = self._meters()
        if meters is None:
            return {}
        return {
            "queue_bytes": meters.bytes_held,
            "put_wait": round(meters.put_wait, 3),
            "lease_wait": round(meters.lease_wait, 3),
            **self._online(tokens, meters, seconds),
        }

    def numbers(self, tokens: int) -> dict[str, Any]:
        """For the record of an online training; `tokens` as of `now`."""
        meters, seconds = self._meters()
        if meters is None or not self._is_online:
            return {}
        return {
            "queue_peak_bytes": meters.peak_bytes,
            "drafters_waited": round(meters.lease_wait, 1),
            "targets_waited": round(meters.put_wait, 1),
            **self._online(tokens, meters, seconds),
        }

    def sentences(self) -> Iterator[str]:
        """Online: which side starves and what helps, and what is kept."""
        meters, seconds = self._meters()
        if meters is None or not seconds or not self._is_online:
            return
        drafters, targets = self._shares(meters, seconds)
        tee = self._watched.tee if self._watched is not None else None
        said = starvation(drafters, targets, targets=self._targets, drafters=self._drafters)
        # Where all is kept the targets have ended: no other split of devices would be better.
        if said is not None and (tee is None or not tee.is_complete):
            yield said
        if tee is not None:
            yield tee.sentence()

    @property
    def _is_online(self) -> bool:
        return self._watched is not None and self._watched.target_meters is not None

    def _meters(self) -> tuple[Meters | None, float]:
        if self._end is not None:
            return self._end
        if self._watched is None:
            return None, 0.0
        return self._watched.channel.meters(), time.monotonic() - self._started

    def _shares(self, meters: Meters, seconds: float) -> tuple[float, float]:
        """Of their time, that drafters wait for features, and targets for room.

        Until the first features are there, the targets are loaded: nobody is too slow then.
        """
        if meters.first_item is None or seconds <= meters.first_item:
            return 0.0, 0.0
        seconds -= meters.first_item
        told = self._watched.target_meters if self._watched else None
        # What is kept is put by no target.
        put_wait = meters.put_wait - (told.read_wait if told else 0.0)
        return (
            (meters.lease_wait - meters.first_lease_wait) / seconds / self._drafters,
            max(0.0, put_wait) / seconds / self._targets,
        )

    def _online(self, tokens: int, meters: Meters, seconds: float) -> dict[str, Any]:
        watched = self._watched
        if watched is None or watched.target_meters is None or not seconds:
            return {}
        drafters, targets = self._shares(meters, seconds)
        busy = seconds * self._drafters - meters.lease_wait
        rate = watched.target_meters.rate
        return {
            "drafters_wait": round(drafters, 4),
            "targets_wait": round(targets, 4),
            "target_rate": rate and round(rate, 1),
            "drafter_rate": round(tokens / busy, 1) if tokens and busy > 0 else None,
            "captured_tokens": watched.target_meters.tokens,
            **(watched.tee.numbers() if watched.tee is not None else {}),
        }


def sides_of(recipe: Recipe) -> Sides:
    """How many work on each side; without targets the one thread that reads the store."""
    targets = len(capture_devices(recipe)) or 1
    return Sides(targets=targets, drafters=len(training_devices(recipe.train)))
