"""What only one kind of stage has to tell: a training's curve, an extraction's workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.recipe.checkpoints import Checkpoint, Parent, rank
from paceline.recipe.stage import Record


@dataclass(frozen=True, kw_only=True)
class OnlineNow:
    """The two sides of an online training, as its last step says."""

    queue_bytes: int
    """Hidden states that wait for the drafters."""
    drafters_wait: float
    """Share of their time in which drafters have waited for hidden states."""
    targets_wait: float
    """Share of their time in which targets have waited for room."""
    target_rate: float | None = None
    """Tokens per second of one target that never waits."""
    drafter_rate: float | None = None
    kept_samples: int | None = None
    """Training samples that need no target any more; null where none are kept."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What only a training has."""

    step: int | None
    """Optimizer steps done, as the last event says."""
    loss: float | None
    """Mean loss of the last step that is told of."""
    learning_rate: float | None
    tau: dict[str, float]
    """Simulated τ by method, of the newest checkpoint that has one."""
    tau_step: int | None
    """The step of that checkpoint."""
    checkpoints: tuple[str, ...]
    """Folder names, oldest first."""
    newest: str | None
    resumes_from: str | None
    """The newest that can be read: an unfinished training goes on from there, if its checksums
    hold. None: from the beginning."""
    best: str | None
    """The one that the finished training has chosen. Before, the one of the highest τ; of equal
    ones, or without any, the newest."""
    parent: Parent | None = None
    """The checkpoint of another run that it began with, if it is a fork."""
    online: OnlineNow | None = None
    """While targets and drafters are at work."""


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """A worker process of the extraction."""

    number: int
    state: str
    """`loading`, `warming`, `capturing`, `waiting for upload`, `draining`, and so on."""
    pid: int | None = None
    device: str = ""
    unit: str | None = None
    """The shard in work."""
    since: float = 0.0
    """When this state began, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Why nothing more is made at this moment."""

    kind: str
    """`budget`, `space`, `store` or `journal`."""
    reason: str
    since: float


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A call to the file system or the store that does not return."""

    worker: int | None
    """None: the extraction's own process."""
    call: str
    path: str
    since: float
    process_state: str = ""
    """As the kernel says: `D` waits for a device, and no signal ends it."""


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """What only an extraction has, as its last event says."""

    state: str = ""
    """`skipping`, while what is there is looked at and what is verified is left as it is; then the
    workers have states."""
    units: int = 0
    """Shards in all."""
    units_done: int = 0
    units_skipped: int = 0
    """Of those done: by earlier starts. While `skipping`: found verified so far."""
    workers: tuple[WorkerNow, ...] = ()
    waiting: Waiting | None = None
    stuck: tuple[Stuck, ...] = ()
    staging_bytes: int = 0
    """Bytes that are made and not yet confirmed by the store."""
    staging_limit: int | None = None
    backlog_units: int = 0
    """Shards that wait for their upload or are under way."""
    backlog_bytes: int = 0
    uploaded_bytes: int = 0
    upload_cpu_share: float | None = None
    """CPU time of the uploads over wall time."""
    stall_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time in which nothing more could be made, by kind."""
    free_bytes: int | None = None
    """Free where shards are written."""
    samples_per_s: float | None = None
    part: str = ""
    """Of the work, such as `1/4`, where several machines share it; empty: all."""


def online_part(event: Mapping[str, Any]) -> OnlineNow | None:
    """What a step's event tells of an online training; None where it is of another kind."""
    try:
        return msgspec.convert(event, OnlineNow)
    except msgspec.ValidationError:
        return None


def training_part(
    checkpoints_folder: Path,
    checkpoints: Sequence[Checkpoint],
    record: Record | None,
    *,
    step: int | None,
    loss: float | None,
    learning_rate: float | None,
) -> Training:
    """What the checkpoints of that folder tell; the rest is what the events said."""
    measured = [c for c in checkpoints if c.tau]
    readable = [c for c in checkpoints if c.step >= 0]
    best = max(checkpoints, key=lambda c: rank(checkpoints_folder / c.name, c.tau), default=None)
    chosen = record.report.get("best") if record and record.outputs is not None else None
    return Training(
        step=step,
        loss=loss,
        learning_rate=learning_rate,
        tau=measured[-1].tau if measured else {},
        tau_step=measured[-1].step if measured else None,
        checkpoints=tuple(c.name for c in checkpoints),
        newest=checkpoints[-1].name if checkpoints else None,
        parent=readable[-1].parent if readable else None,
        resumes_from=readable[-1].name if readable else None,
        best=(chosen if isinstance(chosen, str) else None) or (None if best is None else best.name),
    )


def extraction_part(event: Mapping[str, Any], *, is_running: bool) -> Extraction | None:
    """What an event of the extraction tells; None where it is of another form.

    Of one that has ended, workers and waits are left out: they are no more.
    """
    try:
        found = msgspec.convert(event, Extraction)
    except msgspec.ValidationError:
        return None
    return found if is_running else replace(found, workers=(), waiting=None, stuck=())


def skipping_part(before: Mapping[str, Any], checking: Mapping[str, Any]) -> Extraction | None:
    """What an extraction tells that looks at what is there; None as of `extraction_part`.

    `before` is the last event with counts, of an earlier start: there are no workers now.
    """
    found = extraction_part(
        {**before, "units_done": 0, "units_skipped": 0, **checking}, is_running=False
    )
    return None if found is None else replace(found, state="skipping")
