"""The inside of a worker process: set up, make units, and give signs of life."""

import pickle
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from paceline.durable.code import source_hash
from paceline.durable.iowatch import IoWatch
from paceline.flow.messages import (
    Beat,
    Finished,
    Hello,
    Ready,
    Told,
    failure_of_unit,
    packed,
    raised,
)
from paceline.flow.process import receive_bytes, send_bytes
from paceline.flow.units import CAPTURING, Handler, WorkerContext


@dataclass(frozen=True)
class Orders:
    """What a worker process is started with."""

    number: int
    threads: int
    stuck_after: float
    tells_code: bool

    @property
    def beat(self) -> float:
        """Seconds between signs of life while everything returns."""
        return min(5.0, self.stuck_after / 4)

    @property
    def quick_beat(self) -> float:
        """Seconds between them while something does not."""
        return min(1.0, self.stuck_after / 4)

    @property
    def old(self) -> float:
        """Seconds from which on a call is told of."""
        return min(10.0, self.stuck_after / 2)


class _SupervisorGone(BaseException):
    """The other end is closed; not an Exception, so that no handler takes it for its own."""


class _Line:
    """The worker's end; the beats come from a thread of their own."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        data = packed(message)
        try:
            with self._lock:
                send_bytes(self._end, data)
        except OSError:
            raise _SupervisorGone from None

    def receive(self) -> bytes:
        try:
            return receive_bytes(self._end)
        except EOFError:
            raise _SupervisorGone from None


def work(end: socket.socket, orders: Orders) -> None:
    """Make units until the supervisor closes its end; ends the process where one is unsound."""
    line = _Line(end)
    watch = IoWatch()
    threading.Thread(target=_beat, args=(line, watch, orders), daemon=True).start()
    context = WorkerContext(orders.number, watch, lambda state: line.send(Told(state)))
    doing = "loading the setup function"
    try:
        line.send(Hello(source_hash() if orders.tells_code else ""))
        setup, payload = pickle.loads(line.receive())
        # Torch loaded later goes by OMP_NUM_THREADS; work without it should not wait for it.
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(orders.threads)
        doing = "the setup"
        handle = setup(payload, context)
        line.send(Ready())
        while True:
            doing = "waiting for a unit"
            data = line.receive()
            doing = "the work"
            _make(line, handle, data, context)
    except _SupervisorGone:
        return
    except Exception as error:  # noqa: BLE001
        with suppress(_SupervisorGone):
            line.send(raised(error, doing))
        raise SystemExit(1) from None


def _make(line: _Line, handle: Handler, data: bytes, context: WorkerContext) -> None:
    task, path = pickle.loads(data)
    context.state(CAPTURING)
    try:
        answer: object = Finished(packed(handle(task, path)))
    except Exception as error:
        answer = failure_of_unit(error)
        if answer is None:
            raise
    line.send(answer)


def _beat(line: _Line, watch: IoWatch, orders: Orders) -> None:
    while True:
        # Long ones at once: who freezes in them may give no further sign.
        calls = tuple(c for c in watch.ongoing() if c.slack or c.seconds >= orders.old)
        try:
            line.send(Beat(calls))
        except _SupervisorGone:
            return
        time.sleep(orders.quick_beat if calls else orders.beat)
