"""Setup functions of worker processes; a module of its own because workers import it by name."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from paceline.durable.errors import DataError, Interrupted
from paceline.flow.launch import map_items


def squares(offset: int) -> Callable[[int], tuple[int, int]]:
    pid = os.getpid()
    return lambda item: (item * item + offset, pid)


def facts(_: None) -> Callable[[int], dict[str, Any]]:
    import torch

    return lambda _: {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "wait": os.environ.get("OMP_WAIT_POLICY"),
        "omp": os.environ.get("OMP_NUM_THREADS"),
    }


def logged(folder: Path) -> Callable[[int], int]:
    """Handlers that write down which item they got and when."""

    def handle(item: int) -> int:
        (folder / f"{time.monotonic_ns()}-{item}").touch()
        time.sleep(0.3 if item == 0 else 0.01)
        return item

    return handle


def troubled(how: str) -> Callable[[int], Any]:
    """Item 3 goes wrong; the others sleep for an hour, so only being ended lets them go."""
    if how == "setup":
        raise ValueError("no such model")

    def handle(item: int) -> Any:
        if item != 3:
            if item > 3:
                time.sleep(3600)
            return item
        if how == "raise":
            raise ValueError("item 3 is bad")
        if how == "full":
            raise OSError(errno.ENOSPC, "No space left on device", "shard")
        if how == "own":
            raise DataError("corpus.jsonl, line 3: no messages")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(17)
        if how == "unpicklable":
            return lambda: None
        return item

    return handle


def sleeping(folder: Path) -> Callable[[int], int]:
    (folder / f"pid-{os.getpid()}").touch()

    def handle(item: int) -> int:
        time.sleep(3600)
        return item

    return handle


def draining(folder: Path) -> Callable[[int], int]:
    """Items that say when they begin, and end once the file `go` is there."""

    def handle(item: int) -> int:
        (folder / f"began-{item}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        return item

    return handle


def drain(folder: Path) -> None:
    """Map `draining`, and print what came of it."""

    def spawned() -> None:
        # As early as possible: before a worker has reached a line of ours.
        while len(psutil.Process().children()) < 2:
            time.sleep(0.001)
        (folder / "spawned").touch()

    threading.Thread(target=spawned, daemon=True).start()
    try:
        map_items(
            draining,
            folder,
            range(4),
            workers=2,
            threads=1,
            on_result=lambda item, _: print(f"result {item}", flush=True),
        )
    except Interrupted as error:
        print("Interrupted", str(error).split(" The same")[0])


if __name__ == "__main__" and sys.argv[2:] == ["draining"]:
    drain(Path(sys.argv[1]))
elif __name__ == "__main__":
    map_items(
        sleeping, Path(sys.argv[1]), range(4), workers=2, threads=1, on_result=lambda _, __: None
    )


def unequal(offset: int) -> Callable[[int], tuple[int, int]]:
    """Early items take longest, so that results come out of order."""

    def handle(item: int) -> tuple[int, int]:
        time.sleep(0.02 if item % 5 == 0 else 0.001)
        return item * item + offset, os.getpid()

    return handle


def refusing(bad: int) -> Callable[[int], int]:
    def handle(item: int) -> int:
        if item == bad:
            raise DataError(f"row {item} is bad")
        return item

    return handle


def failing(how: str) -> Callable[[int], int]:
    def handle(item: int) -> int:
        if item == 3 and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 3:
            raise ValueError(f"item {item} is bad")
        return item

    return handle
