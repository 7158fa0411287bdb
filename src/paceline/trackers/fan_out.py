"""All trackers of a training behind one listener to its events."""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from paceline.durable.fs import write_atomic
from paceline.masking import masked
from paceline.recipe.load import resolve_paths
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.tracker_inputs import OPTIONS
from paceline.trackers.lane import RETRY, Lane
from paceline.trackers.metrics import metrics_of, note_of
from paceline.trackers.mlflow import MLflow
from paceline.trackers.tensorboard import TensorBoard
from paceline.trackers.tracker import RunIdentity, Tracker
from paceline.trackers.trackio import Trackio
from paceline.trackers.wandb import Wandb

_LOG = logging.getLogger(__name__)

FILE = "trackers.json"
"""In the run directory: the id under which trackers know the run."""

WAIT = 10.0
"""Seconds that the end of a training may wait for all trackers together."""

_ENDS = ("finished", "failed", "interrupted")


@dataclass(frozen=True)
class _File:
    """What FILE holds."""

    id: str


class Trackers:
    """Hears the events of a training and tells every tracker; raises nothing and waits for none.

    As a context manager it closes the trackers' runs, and waits at most WAIT seconds for it.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        recipe: Recipe,
        run_dir: RunDir,
        *,
        wait: float = WAIT,
        retry: float = RETRY,
    ) -> None:
        """`trackers` by name; `retry` is the pause between two attempts to open a run."""
        self._trackers, self._recipe, self._run_dir = trackers, recipe, run_dir
        self._wait, self._retry = wait, retry
        self._id = ""
        self._lanes: list[Lane] = []
        self._early: list[tuple[str, Mapping[str, Any]]] = []
        self._step = 0
        self._outcome = "failed"

    def claim(self, known: str = "") -> str:
        """The run's id at trackers, the same at every start; to be called before the training.

        It is that of FILE, else the one that a checkpoint holds, `known`, else a new one. Without
        a tracker it is `known`, and nothing is written.
        """
        if not self._trackers:
            return known
        path = self._run_dir.root / FILE
        found = _read_id(path)
        self._id = found or known or uuid.uuid4().hex
        if not found:
            try:
                write_atomic(path, msgspec.json.encode(_File(self._id)))
            except OSError as error:
                _LOG.warning("%s cannot be written (%s): checkpoints keep the id", path, error)
        return self._id

    def hear(self, kind: str, event: Mapping[str, Any]) -> None:
        """Tell trackers of an event, from the first `start` on; for `EventWriter`."""
        if not self._trackers:
            return
        try:
            if kind == "start" and not self._lanes:
                self._start(event)
            elif not self._lanes:
                self._early.append((kind, event))
            else:
                self._tell(kind, event)
        except Exception:  # noqa: BLE001
            # A fault here is ours, and still no reason to end a training of days.
            _LOG.warning("trackers: event %s could not be told", kind, exc_info=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lane in self._lanes:
            lane.end(self._outcome)
        until = time.monotonic() + self._wait
        for lane in self._lanes:
            lane.join(max(until - time.monotonic(), 0.0))

    def _start(self, event: Mapping[str, Any]) -> None:
        self._step = event["step"]
        self._id = self._id or self.claim()
        run = RunIdentity(
            id=self._id,
            name=f"{self._run_dir.root.name}-{self._id[:8]}",
            project=self._recipe.train.tracker_project,
            folder=self._run_dir.root,
            step=self._step,
        )
        config = masked(resolve_paths(self._recipe))
        self._lanes = [
            Lane(name, tracker, run, config, retry=self._retry)
            for name, tracker in self._trackers.items()
        ]
        for kind, earlier in self._early:
            self._tell(kind, earlier)
        self._early.clear()

    def _tell(self, kind: str, event: Mapping[str, Any]) -> None:
        # An end that an error brings has no step of its own.
        self._step = event.get("step", self._step)
        if kind in _ENDS:
            self._outcome = kind
        metrics, note = metrics_of(kind, event), note_of(kind, event)
        for lane in self._lanes:
            if metrics:
                lane.log(self._step, metrics)
            if note:
                lane.note(self._step, note)


def trackers_of(recipe: Recipe, run_dir: RunDir) -> Trackers:
    """The trackers that a recipe names; loads none of their libraries."""
    named, given = recipe.train.trackers, recipe.train.tracker_options
    made: dict[str, Tracker] = {}
    for name in named:
        options = {key: given[key] for key in OPTIONS[name] if key in given}
        made[name] = _MAKERS[name](options)
    return Trackers(made, recipe, run_dir)


_MAKERS: Mapping[str, Callable[[Mapping[str, str]], Tracker]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": lambda _: TensorBoard(),
    "mlflow": MLflow,
}


def _read_id(path: Path) -> str:
    """Empty where there is none; one that cannot be read is warned of, and made anew."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).id
    except FileNotFoundError:
        return ""
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        _LOG.warning("%s: not what was written there (%s)", path, error)
        return ""
