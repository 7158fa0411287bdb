"""Where a process is, seen from outside even after its death; and orders to die at some point.

Imported by the workers of the kills, which start by the hundred: only what costs nothing.
"""

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.iowatch import IoWatch

SUPERVISOR = 0
_UPLOADER = 1
_WORKER = 8
_SLOTS, _WIDTH = 16, 48


class Board:
    """A file in shared memory that says what each thread does; it outlives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(b" " * (_SLOTS * _WIDTH))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SLOTS * _WIDTH)

    def write(self, slot: int, text: str) -> None:
        self._map[slot * _WIDTH : (slot + 1) * _WIDTH] = text[:_WIDTH].ljust(_WIDTH).encode()

    def read(self, slot: int) -> str:
        return self._map[slot * _WIDTH : (slot + 1) * _WIDTH].decode().strip()

    def clear(self) -> None:
        self._map[:] = b" " * (_SLOTS * _WIDTH)


def worker_slot(number: int) -> int:
    return _WORKER + number


@dataclass(frozen=True)
class Order:
    """Who is to be killed, and when."""

    name: str
    """Of the file that says that it was carried out; unique in a tree."""

    who: str
    """`supervisor`, `uploader` (a thread of it, so the same), `group`, or `worker`."""

    worker: int = 0
    place: str = ""
    """What the points are called that count; empty counts all."""

    number: int = 1
    """At which of those, from 1."""

    delay: float = 0.0
    """Seconds from there."""


class Orders:
    """Counts points, and kills when an order's time has come."""

    def __init__(self, folder: Path, board: Board, slot: int, orders: tuple[Order, ...]) -> None:
        self._folder, self._board, self._slot = folder, board, slot
        self._lock = threading.Lock()
        self._left = {order: order.number for order in orders}

    def passes(self, point: str) -> None:
        """A call begins or has ended."""
        if not self._left:
            return
        due = []
        with self._lock:
            for order in list(self._left):
                if point.startswith(order.place):
                    self._left[order] -= 1
                    if not self._left[order]:
                        del self._left[order]
                        due.append((order, slot_here(self._slot)))
        for order, slot in due:
            if order.delay:
                threading.Thread(target=self._later, args=(order, slot), daemon=True).start()
            else:
                self._carry_out(order, slot)

    def _later(self, order: Order, slot: int) -> None:
        time.sleep(order.delay)
        self._carry_out(order, slot)

    def _carry_out(self, order: Order, slot: int) -> None:
        # Created before the kill, which leaves no time for anything behind it.
        words = f"{order.who}\n{self._board.read(slot)}".encode()
        file = os.open(self._folder / order.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(file, words)
        if order.who == "group":
            os.killpg(os.getpgid(0), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class MarkedWatch(IoWatch):
    """A watch that tells a board and the orders of every call."""

    def __init__(self, board: Board, slot: int, orders: Orders) -> None:
        super().__init__()
        self._board, self._slot, self._orders = board, slot, orders
        self.seen: set[str] = set()
        """Points that were passed."""

    @contextmanager
    def call(self, what: str, path: Path | str = "", *, slack: float = 0.0) -> Iterator[None]:
        point = f"{place_of(path)}{what}"
        slot = slot_here(self._slot)
        before = self._board.read(slot)
        with super().call(what, path, slack=slack):
            self._board.write(slot, point)
            self.seen.add(point)
            self._orders.passes(point)
            try:
                yield
            finally:
                self._orders.passes(point)
                self._board.write(slot, before)


def slot_here(own: int) -> int:
    """The slot of the calling thread of a process whose main thread has `own`."""
    name = threading.current_thread().name
    if name.startswith("paceline-upload-"):
        return _UPLOADER + int(name.rpartition("-")[2])
    return own


def place_of(path: Path | str) -> str:
    """What a path is, for the names of points."""
    name = Path(path).name
    for mark, place in (
        ("journal", "journal: "),
        ("unit-", "unit: "),
        ("manifest", "manifest: "),
        ("units", "folder: "),
        ("features", "folder: "),
        ("owner.lock", "lock: "),
        ("staging", "staging: "),
        ("paceline-", "staging: "),
    ):
        if name.startswith(mark):
            return place
    return ""
