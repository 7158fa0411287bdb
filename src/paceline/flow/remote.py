"""One worker process that answers one thread's requests; started again when it dies."""

import logging
import pickle
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.durable.errors import OutOfMemory, WorkerFailed, storage_refused
from paceline.flow.crew import setup_error
from paceline.flow.messages import (
    Beat,
    Failed,
    Finished,
    Hello,
    Raised,
    Ready,
    Refused,
    Told,
    sendable,
)
from paceline.flow.patience import Patience
from paceline.flow.process import Child, end_children, receive_bytes, send_bytes, start_child
from paceline.flow.stuck import Report, WorkerPulse
from paceline.flow.worker import Orders, work

_LOG = logging.getLogger(__name__)

_GLANCE = 1.0
"""Seconds between two looks at a silent process."""

_TRIES = 3
"""Starts in a row that an exception of the process's own may end."""

_GONE = 10.0
"""Seconds that a killed process is waited for: a busy machine takes its time to take it down."""

_LAST_STEPS = 1.0
"""Seconds in which a process that has hung up ends by itself."""


class RemoteDied(Exception):
    """The process is gone, and what it was asked for is not done."""

    def __init__(self, cause: str, *, raised: bool = False) -> None:
        """`raised` tells that an exception of its own has ended it."""
        super().__init__(cause)
        self.raised = raised


@dataclass(frozen=True, kw_only=True)
class RemotePolicy:
    """How worker processes are treated."""

    threads: int = 1
    """CPU threads of each."""
    restarts: int = 20
    """Of each, within `restart_window`; at the next death it gives up."""
    restart_window: float = 600.0
    """Seconds."""
    backoff: float = 0.5
    """Seconds before the first restart; doubled with each that brings nothing."""
    stuck_after: float = 30.0
    """Seconds after which a call that has not returned is reported."""
    kill_after: float = 300.0
    """Seconds after which a process that is stuck in a call is killed, and another one begun."""


class Remote:
    """A worker process; `start`, `ask`, `post` and `answer` are for one thread at a time.

    The thread that starts it has to live as long: the kernel ends the process with it.
    """

    def __init__(
        self,
        name: str,
        number: int,
        setup: Callable[..., Any],
        payload: Any,
        *,
        policy: RemotePolicy,
        environment: Mapping[str, str],
        report: Report,
    ) -> None:
        """`setup(payload, context)` gives the function that answers, as in `supervise`.

        `report` is told of calls that do not return, and of starts and deaths (`worker`).
        """
        self.name = name
        self.number = number
        self._job = sendable((setup, payload), f"the setup of {name}")
        self._policy = policy
        self._environment = environment
        self._report = report
        self._patience = Patience(
            restarts=policy.restarts, window=policy.restart_window, backoff=policy.backoff
        )
        self._child: Child | None = None
        self._pulse: WorkerPulse | None = None
        self._over = threading.Event()
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        """Of its process; None where it has none."""
        child = self._child
        return child.pid if child else None

    @property
    def is_over(self) -> bool:
        """Whether `end` was called."""
        return self._over.is_set()

    def start(self) -> None:
        """Start the process and set it up; after a death the next one, following a pause.

        Raises WorkerFailed where it dies too often, RemoteDied where `end` was called, and what
        the setup raises of UserError's kind.
        """
        cause, raised = "", 0
        while True:
            if self._over.is_set():
                raise RemoteDied("ended")
            try:
                self._begin()
            except RemoteDied as died:
                cause, raised = str(died), raised + died.raised
                if raised == _TRIES:
                    raise WorkerFailed(f"{self.name} does not start: {cause}") from died
            except OSError as error:
                cause = f"the system starts no process: {error}"
            else:
                return
            self._rest(cause)

    def restart(self, cause: str) -> None:
        """After RemoteDied: as `start`."""
        self._rest(cause)
        self.start()

    def ask(self, request: Any) -> Any:
        """Post a request and wait for its answer."""
        self.post(request)
        return self.answer()

    def post(self, request: Any) -> None:
        """Send a request. Raises RemoteDied where the process is gone."""
        self._send(sendable((request, None), type(request).__name__))

    def answer(self) -> Any:
        """Wait for the answer to the oldest request without one.

        Raises RemoteDied where the process is gone, WorkerFailed where it says that it cannot do
        it and is sound, OutOfMemory where it said so, StorageRefused where its disk refuses.
        """
        message = self._receive()
        match message:
            case Finished(made):
                self._patience.succeeded()
                return pickle.loads(made)
            case Failed(summary, error):
                full = setup_error(error)
                if isinstance(full, OutOfMemory):
                    raise full
                raise WorkerFailed(f"{self.name}: {summary}")
            case Refused(error):
                raise storage_refused(error) or error
        raise WorkerFailed(f"{self.name} sent {type(message).__name__}, which nobody asked for")

    def kill(self) -> None:
        """Have the process die now, from any thread; it may be started again."""
        child = self._child
        if child is not None:
            child.kill()

    def end(self) -> None:
        """End the process for good, from any thread; whoever waits for an answer hears of it."""
        self._over.set()
        self.kill()

    def rest(self) -> None:
        """End the process for now; `start` begins another."""
        self.kill()
        self.bury()
        self._child = None

    def bury(self) -> None:
        """Wait until the process that `end` has killed is gone."""
        child = self._child
        if child is not None:
            end_children([child], _GONE)
        if self._pulse is not None:
            self._pulse.clear()

    def _begin(self) -> None:
        # Who found it dead by other signs than its silence has not seen it end.
        self.bury()
        orders = Orders(
            number=self.number,
            threads=self._policy.threads,
            stuck_after=self._policy.stuck_after,
            tells_code=False,
        )
        self._child = start_child(work, (orders,), name=self.name, environment=self._environment)
        self._pulse = WorkerPulse(
            self.number, self._child.pid, self._policy.stuck_after, self._report, self.name
        )
        if self._over.is_set():
            self._child.kill()
        _LOG.info("%s: process %d begins", self.name, self._child.pid)
        while not isinstance(message := self._receive(), Ready):
            if isinstance(message, Hello):
                self._send(self._job)
        _LOG.info("%s: ready%s", self.name, " again" if self.deaths else "")
        self._tell("restarted" if self.deaths else "started", "")

    def _send(self, data: bytes) -> None:
        assert self._child is not None
        try:
            send_bytes(self._child.socket, data)
        except OSError:
            raise self._died() from None

    def _receive(self) -> Any:
        assert self._child is not None
        assert self._pulse is not None
        end, poll, is_killed = self._child.socket, select.poll(), False
        poll.register(end, select.POLLIN)
        while True:
            try:
                # Not `select`, which knows no descriptor above 1023.
                if not poll.poll(1000 * _GLANCE):
                    self._pulse.sample()
                    if not is_killed and self._pulse.stuck_seconds >= self._policy.kill_after:
                        _LOG.warning("%s (process %d): killed", self.name, self._child.pid)
                        self.kill()
                        # What the kernel holds ends later than that, or never.
                        is_killed = True
                    continue
                message = pickle.loads(receive_bytes(end))
            except (EOFError, OSError):
                raise self._died() from None
            self._pulse.heard()
            match message:
                case Beat(calls):
                    self._pulse.calls(calls)
                case Told():
                    pass
                case Raised():
                    error = setup_error(message.error)
                    if error is not None:
                        error.add_note(f"in {self.name}")
                        raise error
                    raise self._died(f"{message.doing} failed: {message.summary}", raised=True)
                case _:
                    return message

    def _died(self, cause: str = "", *, raised: bool = False) -> RemoteDied:
        assert self._child is not None
        assert self._pulse is not None
        child = self._child
        if not cause:
            child.wait(_LAST_STEPS)
            cause = child.how_it_ended()
        end_children([child], _GONE)
        self._pulse.clear()
        if not self._over.is_set():
            _LOG.warning("%s (process %d): %s", self.name, child.pid, cause)
            self._tell("died", cause)
        return RemoteDied(cause, raised=raised)

    def _rest(self, cause: str) -> None:
        """The pause after a death. Raises WorkerFailed where there were too many."""
        self.deaths += 1
        pause = self._patience.after_death(time.monotonic())
        if pause is None:
            self._tell("gave_up", cause)
            raise WorkerFailed(
                f"{self.name} has died {self.deaths} times, {self._policy.restarts} of them within "
                f"{self._policy.restart_window:.0f} seconds; the last cause: {cause}"
            )
        self._over.wait(pause)

    def _tell(self, what: str, how: str) -> None:
        fields = {"number": self.number, "pid": self.pid, "name": self.name}
        self._report("worker", {**fields, "what": what, "how": how})
