"""Setup functions of unit workers; a module of its own because workers import it by name."""

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.durable.checksum import crc64
from paceline.durable.depot import DepotMeters, Failed, Verified
from paceline.durable.errors import Interrupted, StorageRefused, TargetError
from paceline.durable.fs import write_atomic
from paceline.durable.stalls import Wait
from paceline.durable.store import Stat
from paceline.flow import worker
from paceline.flow.supervisor import supervise
from paceline.flow.units import Made, Policy, Task, WorkerContext
from paceline.flow.worker import Orders, work


@dataclass(frozen=True)
class Plan:
    """What goes wrong, by the index of the unit; each way at most `times` times."""

    folder: Path
    """Marks of what has happened, common to all workers."""
    how: dict[int, str] = field(default_factory=dict)
    setup: dict[int, str] = field(default_factory=dict)
    """By worker number."""
    times: int = 1
    seconds: float = 0.0
    """What a unit takes."""


def tasks(count: int, num_bytes: int = 100) -> list[Task]:
    return [Task(i, f"unit-{i:03d}", num_bytes, 10, b"%d" % i) for i in range(count)]


def work_with_other_code(end: socket.socket, orders: Orders) -> None:
    """A worker whose files are not those of its supervisor any more."""
    worker.source_hash = lambda: "0123456789abcdef"
    work(end, orders)


def content(task: Task) -> bytes:
    return task.payload * 7


def unit_worker(plan: Plan, context: WorkerContext) -> Callable[[Task, Path], Made]:
    (plan.folder / f"pid-{os.getpid()}").write_text(str(context.number))
    _go_wrong(plan, plan.setup.get(context.number, ""), f"setup-{context.number}", context)
    context.state("warming")
    time.sleep(min(plan.seconds, 0.1))

    def handle(task: Task, path: Path) -> Made:
        context.state("capturing")
        with (plan.folder / f"handed-{task.index}").open("a") as file:
            file.write(f"{context.number} {os.getpid()}\n")
        time.sleep(plan.seconds)
        _go_wrong(plan, plan.how.get(task.index, ""), f"unit-{task.index}", context)
        data = content(task)
        write_atomic(path, data, fs=context.fs)
        return Made(Stat(len(data), crc64(data)), {"worker": context.number, "pid": os.getpid()})

    return handle


def _go_wrong(plan: Plan, how: str, name: str, context: WorkerContext) -> None:
    if how == "later" and _count(plan.folder, name) > plan.times:
        raise TargetError(f"{name}: not finite")
    if not how or how == "later" or _count(plan.folder, name) > plan.times:
        return
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "raise":
            raise ValueError(f"{name} is bad")
        case "own":
            raise TargetError(f"{name}: not finite")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/staging/unit")
        case "refused":
            raise StorageRefused("no room", errno.EDQUOT)
        case "hang":
            time.sleep(3600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "gil":
            # A C function that is called with the GIL held: no beat gets out.
            ctypes.PyDLL(None).sleep(3600)
        case "long gil":
            with context.watch.call("load", plan.folder, slack=3600):
                time.sleep(0.8)
                ctypes.PyDLL(None).sleep(3600)
        case "long":
            with context.watch.call("load", plan.folder, slack=3600):
                time.sleep(2)
        case "fifo":
            fifo = plan.folder / f"fifo-{name}"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(fifo)
            context.fs.open_append(fifo)
        case "pipe":
            read, write = os.pipe()
            with os.fdopen(write, "wb", buffering=0) as file:
                context.fs.write(file, bytes(1 << 20))
            os.close(read)
        case "unpicklable":
            raise _Unpicklable(threading.Lock())
        case _:
            raise AssertionError(how)


class _Unpicklable(Exception):
    pass


def _count(folder: Path, name: str) -> int:
    with (folder / f"wrong-{name}").open("a") as file:
        file.write("x")
        file.flush()
        return file.tell()


class MemoryDepot:
    """A depot over a folder that forgets everything with its process, and says what was asked."""

    def __init__(self, folder: Path, limit: int = 10**9) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.limit = limit
        self.recovered: dict[str, Stat] = {}
        self.held: dict[str, int] = {}
        self.ended: list[Verified | Failed] = []
        self.on_the_way: dict[str, Stat] = {}
        self.calls: Counter[str] = Counter()
        self.abandoned: list[str] = []
        self.refusals: list[tuple[str, OSError]] = []
        self.hold_back = False
        """Nothing made is verified until this is off."""
        self.wait: Wait | None = None
        self.gives_up: str | None = None
        self.verified: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        return len(self.on_the_way) + len(self.ended)

    def place(self, key: str) -> Path:
        return self.folder / key

    def admit(self, key: str, num_bytes: int) -> Wait | None:
        self.calls["admit"] += 1
        if num_bytes > self.limit:
            raise ValueError(f"{key}: {num_bytes} bytes are more than {self.limit}")
        if self.wait is not None:
            return self.wait
        if sum(self.held.values()) + num_bytes > self.limit:
            return Wait("staging is full", "budget", time.time())
        assert key not in self.held
        self.held[key] = num_bytes
        return None

    def made(self, key: str, stat: Stat) -> None:
        self.on_the_way[key] = stat

    def abandon(self, key: str) -> None:
        del self.held[key]
        self.abandoned.append(key)
        self.place(key).unlink(missing_ok=True)

    def refused(self, key: str, error: OSError) -> None:
        self.refusals.append((key, error))
        self.abandon(key)

    def poll(self) -> list[Verified | Failed]:
        self.calls["poll"] += 1
        if not self.hold_back:
            for key, stat in self.on_the_way.items():
                data = self.place(key).read_bytes()
                assert Stat(len(data), crc64(data)) == stat
                self.verified[key] += 1
                self.held.pop(key, None)
                self.ended.append(Verified(key, stat))
            self.on_the_way.clear()
        ended, self.ended = self.ended, []
        return ended

    def overdue(self) -> str | None:
        return self.gives_up

    @property
    def waiting(self) -> Wait | None:
        return self.wait

    def meters(self) -> DepotMeters:
        return DepotMeters(
            staging_bytes=sum(self.held.values()),
            staging_limit=self.limit,
            backlog_units=len(self.on_the_way),
            backlog_bytes=0,
            in_flight=len(self.on_the_way),
            uploaded_bytes=0,
            upload_cpu_seconds=0.0,
            stall_seconds={},
            waiting=self.wait,
            retries=0,
            last_error=None,
        )

    def suggest(self, seconds: float) -> list[str]:
        return []

    def close(self) -> None:
        pass


def main(folder: Path, count: int, seconds: float) -> None:
    """Supervise in a process of its own, and print what came of it."""
    depot = MemoryDepot(folder / "store")

    def on_verified(task: Task, made: Made | None, stat: Stat) -> None:
        print(f"verified {task.key}", flush=True)

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        print(f"event {kind} {fields}", flush=True)

    try:
        outcome = supervise(
            unit_worker,
            Plan(folder, seconds=seconds, setup={1: "hang"} if count == 1000 else {}),
            tasks(count),
            depot,
            policy=Policy(workers=2),
            on_verified=on_verified,
            on_event=on_event,
        )
        print(outcome)
    except Interrupted as error:
        print("Interrupted", error)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
