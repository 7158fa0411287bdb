"""One worker process as its supervisor sees it: started, listened to, ended, started again."""

import os
import pickle
import time
from dataclasses import dataclass
from enum import Enum, auto

from paceline.durable.errors import OutOfMemory, PacelineError, UserError
from paceline.flow.devices import device_environment
from paceline.flow.messages import sendable
from paceline.flow.patience import Patience
from paceline.flow.process import Child, Mailbox, environment_of, start_child
from paceline.flow.stuck import Report, WorkerPulse
from paceline.flow.units import CAPTURING, GAVE_UP, IDLE, RESTARTING, STARTING, Policy, WorkerView
from paceline.flow.work import Entry
from paceline.flow.worker import Orders, work

_LAST_STEPS = 0.3
"""Seconds in which a process that has hung up ends by itself."""

_ENDING = 5.0
"""Seconds in which a process whose connection has ended should be gone."""

_UNKILLABLE = 60.0
"""Seconds after which a process that was killed and is still there counts as lost."""


class Phase(Enum):
    """Where a worker is."""

    ABSENT = auto()
    """Not started yet, or to be started again when its time comes."""
    STARTING = auto()
    IDLE = auto()
    WORKING = auto()
    ENDING = auto()
    """Killed or dead; until it is gone nobody knows how, and its device is not free."""
    GONE = auto()
    """It is not started again."""


@dataclass(frozen=True)
class Running:
    """What a worker has while it has a process."""

    child: Child
    mailbox: Mailbox
    pulse: WorkerPulse


class Worker:
    """State of one worker; the supervisor decides, this carries it out."""

    def __init__(self, number: int, policy: Policy, report: Report) -> None:
        self.number = number
        self.device = policy.devices[number] if policy.devices else None
        self.phase = Phase.ABSENT
        self.entry: Entry | None = None
        """The unit in work."""
        self.running: Running | None = None
        self.cause = ""
        """Of its last death."""
        self.starts = 0
        self.due = 0.0
        """When it may be started, by the monotonic clock."""
        self._policy = policy
        self._report = report
        self._patience = Patience(
            restarts=policy.restarts, window=policy.restart_window, backoff=policy.backoff
        )
        self._environment = environment_of(policy.threads)
        if self.device is not None:
            self._environment |= device_environment(self.device, os.environ)
        self._ended_at = 0.0
        self._state = STARTING
        self._since = time.time()
        self.has_changed = True
        """Since the last `view`."""

    @property
    def is_ready(self) -> bool:
        """Whether it makes units: set up, and not stuck."""
        return self.phase in (Phase.IDLE, Phase.WORKING) and not self.stuck_seconds

    @property
    def stuck_seconds(self) -> float:
        """How long its oldest reported call has lasted; 0 where it is not stuck."""
        return self.running.pulse.stuck_seconds if self.running else 0.0

    @property
    def name(self) -> str:
        """For messages."""
        device = "" if self.device is None else f", GPU {self.device}"
        process = f" (process {self.running.child.pid}{device})" if self.running else ""
        return f"worker {self.number}{process}"

    def show(self, state: str) -> None:
        """Set the state that people see."""
        if state != self._state:
            self._state, self._since, self.has_changed = state, time.time(), True

    def view(self) -> WorkerView:
        """As it is now."""
        self.has_changed = False
        return WorkerView(
            number=self.number,
            pid=self.running.child.pid if self.running else None,
            device=self.device,
            state=self._state,
            unit=self.entry.task.key if self.entry else None,
            since=self._since,
        )

    def start(self) -> Running:
        """Start its process. Raises OSError where the system gives none."""
        orders = Orders(
            number=self.number,
            threads=self._policy.threads,
            stuck_after=self._policy.stuck_after,
            tells_code=bool(self._policy.code),
        )
        child = start_child(
            work,
            (orders,),
            name=f"paceline-worker-{self.number}",
            environment=self._environment,
        )
        pulse = WorkerPulse(self.number, child.pid, self._policy.stuck_after, self._report)
        self.running = Running(child, Mailbox(child.socket), pulse)
        self.phase = Phase.STARTING
        self.starts += 1
        self.show(STARTING)
        return self.running

    def set_up(self) -> None:
        """Its setup is done."""
        self.phase = Phase.IDLE
        self.show(IDLE)

    def give(self, entry: Entry, path: object) -> None:
        """Send it a unit; it has asked for one."""
        assert self.running is not None
        self.running.mailbox.post(sendable((entry.task, path), repr(entry.task)))
        self.entry, self.phase = entry, Phase.WORKING
        self.has_changed = True
        self.show(CAPTURING)

    def take_back(self) -> Entry:
        """Its unit, which it is done with in some way."""
        entry, self.entry = self.entry, None
        if entry is None:
            raise ValueError(f"{self.name} speaks of a unit and has none")
        self.has_changed = True
        if self.phase is Phase.WORKING:
            assert self.running is not None
            # It has come back from whatever call it was in.
            self.running.pulse.calls(())
            self.phase = Phase.IDLE
            self.show(IDLE)
        return entry

    def succeeded(self) -> None:
        """It has made a unit."""
        self._patience.succeeded()

    def end(self, cause: str) -> None:
        """Kill its process; an empty `cause` is to be found out by `has_ended`."""
        assert self.running is not None
        self.phase, self.cause = Phase.ENDING, cause
        self._ended_at = time.monotonic()
        if not cause:
            # It has hung up and is on its way out: killed now, it would seem to have been killed.
            self.running.child.wait(_LAST_STEPS)
        self.running.child.kill()
        self.running.child.socket.close()
        self.show(RESTARTING)

    def has_ended(self) -> bool:
        """Whether an ending process is gone, or is not to be waited for any more.

        The cause of its death is known then.
        """
        assert self.running is not None
        seconds = time.monotonic() - self._ended_at
        is_gone = self.running.child.is_gone()
        if not self.cause and (is_gone or seconds > _ENDING):
            self.cause = self.running.child.how_it_ended()
        return is_gone or seconds > _UNKILLABLE

    def bury(self) -> float | None:
        """Its process has ended: the seconds until it is started again, None where it gives up."""
        assert self.running is not None
        is_gone = self.running.child.is_gone()
        self.running.pulse.clear()
        self.running = None
        if not is_gone:
            self.cause += f"; killed, and still there after {_UNKILLABLE:.0f} seconds"
        return self.plan_restart() if is_gone else self.give_up()

    def bury_for_good(self) -> None:
        """The end of all workers: its process is gone, and nobody is to hear of it any more."""
        if self.running is not None:
            self.running.pulse.clear()
            self.running = None

    def plan_restart(self) -> float | None:
        """After a death: the seconds until the next start, None where it gives up."""
        now = time.monotonic()
        pause = self._patience.after_death(now)
        if pause is None:
            return self.give_up()
        self.phase, self.due = Phase.ABSENT, now + pause
        self.show(RESTARTING)
        return pause

    def give_up(self) -> None:
        """Not to be started again."""
        self.phase = Phase.GONE
        self.show(GAVE_UP)


def setup_error(data: bytes | None) -> PacelineError | None:
    """The error of a setup that no further try will mend, where the pickled one is of that kind."""
    if data is None:
        return None
    error = pickle.loads(data)
    return error if isinstance(error, UserError | OutOfMemory) else None


def code_error(name: str, loaded: str, ours: str) -> UserError:
    """What is wrong with a worker that has loaded other source than this process."""
    return UserError(
        f"workers of different code in one run: {name} loaded source {loaded}, this process has "
        f"{ours}. Paceline's files were changed meanwhile. Start the command again."
    )
