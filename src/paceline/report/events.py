"""What the event files tell: when each stage was at work, and the curves of the training.

The files are streamed. Of a step only its numbers are kept.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_STEPS = ("step", "skipped_step")


@dataclass(kw_only=True)
class StageTime:
    """When one stage was at work."""

    started: float
    """Seconds since the epoch: its first event."""
    ended: float
    """Its last event."""
    seconds: float = 0.0
    """At work, over all its starts."""


@dataclass(kw_only=True)
class Training:
    """The curves of the training that the newest checkpoint comes from.

    A resumed run repeats the steps after its checkpoint. Those of before are dropped, as the
    weights that they led to were.
    """

    steps: array = field(default_factory=lambda: array("q"))
    loss: array = field(default_factory=lambda: array("d"))
    """Mean loss of each step; NaN where the event has none."""
    learning_rate: array = field(default_factory=lambda: array("d"))
    gradient_norm: array = field(default_factory=lambda: array("d"))
    """Before clipping."""
    skipped: list[int] = field(default_factory=list)
    """Steps that changed nothing, because loss or gradient was not finite."""
    evaluations: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """Simulated τ by method, by step."""

    def add_step(self, event: "_Step", *, is_skipped: bool) -> None:
        """Take one step, dropping what an earlier start of the run did from there on."""
        if self.steps and event.step <= self.steps[-1]:
            self._rewind(event.step)
        self.steps.append(event.step)
        self.loss.append(_number(event.loss))
        self.learning_rate.append(_number(event.learning_rate))
        self.gradient_norm.append(_number(event.gradient_norm))
        if is_skipped:
            self.skipped.append(event.step)

    def _rewind(self, step: int) -> None:
        keep = bisect_left(self.steps, step)
        for column in (self.steps, self.loss, self.learning_rate, self.gradient_norm):
            del column[keep:]
        self.skipped = [s for s in self.skipped if s < step]
        self.evaluations = {s: tau for s, tau in self.evaluations.items() if s < step}


@dataclass(kw_only=True)
class Events:
    """All that the report takes from `events/`."""

    times: dict[str, StageTime] = field(default_factory=dict)
    """By stage."""
    training: Training = field(default_factory=Training)
    unreadable: dict[str, int] = field(default_factory=dict)
    """File name to lines that are no event."""


class _Head(msgspec.Struct):
    t: float
    kind: str
    pid: int = 0


class _Step(msgspec.Struct):
    step: int
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None


class _Evaluation(msgspec.Struct):
    step: int
    simulated_tau: dict[str, float | None] = {}


def read_events(folder: Path, stages: tuple[str, ...]) -> Events:
    """Read `<stage>.jsonl` of each stage, as far as it is there."""
    events = Events()
    for stage in stages:
        path = folder / f"{stage}.jsonl"
        if path.is_file():
            _read_file(path, stage, events)
    return events


def _read_file(path: Path, stage: str, events: Events) -> None:
    time: StageTime | None = None
    session, session_start = -1, 0.0
    for line in _whole_lines(path):
        try:
            head = _HEAD.decode(line)
            if stage == "train":
                _train_event(head, line, events.training)
        except (msgspec.MsgspecError, UnicodeError):
            events.unreadable[path.name] = events.unreadable.get(path.name, 0) + 1
            continue
        if time is None:
            time = events.times[stage] = StageTime(started=head.t, ended=head.t)
        if head.pid != session or head.kind == "start":
            # What lies between two starts, nobody worked.
            session, session_start = head.pid, head.t
        else:
            time.seconds += max(0.0, head.t - session_start)
            session_start = head.t
        time.ended = head.t


def _train_event(head: _Head, line: bytes, training: Training) -> None:
    if head.kind in _STEPS:
        training.add_step(_STEP.decode(line), is_skipped=head.kind == "skipped_step")
    elif head.kind == "evaluation":
        event = _EVALUATION.decode(line)
        training.evaluations[event.step] = event.simulated_tau


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Lines with their end; a last one without is being written, or was torn by a kill."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line


def _number(value: float | None) -> float:
    return math.nan if value is None else value


_HEAD = msgspec.json.Decoder(_Head)
_STEP = msgspec.json.Decoder(_Step)
_EVALUATION = msgspec.json.Decoder(_Evaluation)
