"""Events: one JSON line each, one file per stage; what `status` and reports read.

Every line has `v` (SCHEMA_VERSION), `t` (seconds since the epoch), `pid`, `host`, `role` (the
stage), `kind`, and `elapsed` (seconds since the stage began in this process). The kinds:

- `start`, `progress`, `finished`: the fields of `Counts`, as they stand then. The last line alone
  says how far a stage is. `finished` also has `report`, the numbers of the stage's record.
- `skipped`: the stage was found complete, and nothing was done.
- `redo`: `name` and `reason` of a shard, group or checkpoint that was there and proved nothing.
- `part_done`: `told`, and the counts. What this machine was to do of the stage is done, and others
  do the rest.
- `failed`: `error`, and `refused`: true where what was asked for is impossible (exit code 2).
- `interrupted`: `error`. It and `failed` repeat the last counts where there are any.
- of `train`: `step` and `skipped_step` (not finite, nothing changed), both with the counts and
  with `step`, `loss`, `learning_rate`, `gradient_norm`, `queue_bytes` (features that wait),
  `put_wait` and `lease_wait` (seconds that those who make and those who use them have waited,
  since the start and over all of them), and of an online training the fields of
  `status_parts.OnlineNow`, `captured_tokens` and `kept_bytes`; `worker`, `quarantined`, `stuck` and
  `unstuck` as of `extract`, where workers train; `evaluation` with `step` and `simulated_tau` by
  method; `checkpoint` with `step` and `folder`; `override` with `key`, `made`, `asked` and `step`;
  `fork`, where it begins with another run's checkpoint, with `run`, `name`, `step` and
  `fingerprint` of that.
- of `extract`: `checking`, while the store is compared with the records, with `part`, `units`, and
  how many of them are proven by now as `units_done` and `units_skipped`; `recovery` with `ending`
  and `lines`, how the last run ended; `worker` with
  `number`, `worker_pid`, `what` and `how`; `waiting` with `wait` (its kind) and `reason`, and
  `going_on`; `stuck` with `worker` (null: the extraction's own process), `worker_pid`, `call`,
  `path`, `seconds` and `process_state`, and `unstuck`; `failed_unit` and `quarantined` with `key`
  and `reason`. Its events with counts also have the fields of `status_parts.Extraction`.

A stage may add fields of its own. Readers leave alone what they do not know.
"""

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import msgspec

from paceline.masking import masked_texts

SCHEMA_VERSION = 2

Kind = Literal[
    "start",
    "progress",
    "redo",
    "finished",
    "skipped",
    "failed",
    "interrupted",
    "part_done",
    "step",
    "skipped_step",
    "evaluation",
    "checkpoint",
    "override",
    "fork",
    "checking",
    "recovery",
    "worker",
    "waiting",
    "going_on",
    "stuck",
    "unstuck",
    "failed_unit",
    "quarantined",
]

COUNTED = ("start", "progress", "finished", "step", "skipped_step")
"""Kinds that always carry the counts."""

ENDS = ("finished", "skipped", "failed", "interrupted", "part_done")
"""Kinds after which a process tells nothing more of its stage."""

_INTERRUPTED = 130
_IMPOSSIBLE = 2


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How far a stage is, over all its processes; `redone` and `rate` are of this one."""

    unit: str
    """What is counted, in the plural: rows, prompts, samples."""
    total: int | None = None
    """Of them in all; None where it shows at the end alone."""
    done: int = 0
    """Dealt with: by earlier runs, failed and quarantined ones included."""
    skipped: int = 0
    """Of `done`: found done by earlier runs, and left as they were."""
    redone: Mapping[str, int] = field(default_factory=dict)
    """What is made again: it was there and proved nothing, or its worker died or failed over it.
    Reason to how many `redone_unit`."""
    redone_unit: str = ""
    """What `redone` counts, in the plural: shards, groups, checkpoints; empty where it has none."""
    failed: int = 0
    """Of `done`: tried without a result."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Of `done`: set aside, reason code to how many."""
    tokens: int = 0
    """Tokens of what is done."""
    tokens_total: int | None = None
    """Tokens in all; None where it shows at the end alone."""
    rate: float | None = None
    """Tokens per second of this process; None before there is one."""
    eta: float | None = None
    """Seconds left at that rate; None where unknown."""


def by_reason(reasons: Iterable[str]) -> dict[str, int]:
    """Count reasons by kind: what stands in parentheses tells one case from another."""
    return dict(Counter(reason.split(" (")[0].rstrip(".") for reason in reasons))


class EventWriter:
    """Appends events to the file of a stage, made with the first of them.

    An error here never stops the work: what cannot be written is left out, and the next event is
    tried again. As a context manager it tells of the exception that ends the stage: `interrupted`
    or `failed`, by the error's `exit_code`. Any thread may emit. Secrets in texts are masked.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        *,
        listener: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """`listener` gets each event's kind and fields, written or not; it raises nothing."""
        self._listener = listener
        self.path = folder / f"{role}.jsonl"
        self._role = role
        self._host = socket.gethostname()
        self._start = time.monotonic()
        self._file: BinaryIO | None = None
        self._counts: Counts | None = None
        self._lock = threading.Lock()

    def emit(self, kind: Kind, counts: Counts | None = None, **fields: Any) -> None:
        """Append one event; `fields` are JSON values. Counts go before fields of their name."""
        event = {
            "v": SCHEMA_VERSION,
            "t": round(time.time(), 3),
            "pid": os.getpid(),
            "host": self._host,
            "role": self._role,
            "kind": kind,
            "elapsed": round(time.monotonic() - self._start, 3),
        }
        if counts is not None:
            self._counts = counts
        try:
            event |= masked_texts(fields)
            if counts is not None:
                event |= dataclasses.asdict(counts)
            line = msgspec.json.encode(event) + b"\n"
        except (TypeError, ValueError, RecursionError):
            return
        try:
            with self._lock:
                self._append(line)
        except OSError:
            self.close()
        if self._listener is not None:
            self._listener(kind, event)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            # Without parents: the refusal of a run must not be what makes its directory.
            self.path.parent.mkdir(exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            if _ends_torn(self._file):
                # What a dead process or a full disk cut off must not swallow this event.
                line = b"\n" + line
        if self._file.write(line) != len(line):
            self.close()

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            code = getattr(error, "exit_code", None)
            if code == _INTERRUPTED or isinstance(error, KeyboardInterrupt):
                self.emit("interrupted", self._counts, error=_text(error))
            else:
                refused = code == _IMPOSSIBLE
                self.emit("failed", self._counts, error=_text(error), refused=refused)
        self.close()


def _ends_torn(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _text(error: BaseException) -> str:
    """The error in words; its class too, where it is none of those that are raised on purpose."""
    text = str(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        text = f"stopped at once, by {str(error) or 'Ctrl-C'}"
    lines = [text.removesuffix(": "), *getattr(error, "__notes__", ())]
    # A file name that is no UTF-8 stands in a message as characters that no JSON can hold.
    return "\n".join(lines).encode(errors="backslashreplace").decode()
