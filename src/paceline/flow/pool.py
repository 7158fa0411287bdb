"""Worker processes that each hold one function, and the parent's line to each of them."""

import pickle
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from paceline.durable.errors import WorkerFailed
from paceline.flow.messages import Raised, Ready, raised, summary_of
from paceline.flow.process import GRACE, Child, end_children, environment_of, start_child

_NAME_LIMIT = 160


@dataclass(frozen=True)
class Done:
    """A worker's result, pickled apart: whatever it is, the message itself can be read."""

    result: bytes


class Worker:
    """The parent's end of one worker process."""

    def __init__(self, number: int, child: Child) -> None:
        self.number = number
        self.child = child
        self.connection: Connection = Connection(child.socket.detach())
        self.index: int | None = None
        """Of the item it is working on; None while it sets up and when it is idle."""
        self.doing = "setting up"
        """In words, for errors."""


class Pool:
    """Workers that are started together; who works on what is the caller's."""

    def __init__(self, count: int, threads: int) -> None:
        self._count = count
        self._threads = threads
        self.workers: list[Worker] = []

    def start(self, job: bytes) -> None:
        """Start all workers; `job` is a pickled pair, the setup function and its payload."""
        for number in range(self._count):
            child = start_child(
                _work,
                (self._threads,),
                name=f"paceline-worker-{number}",
                environment=environment_of(self._threads),
            )
            self.workers.append(Worker(number, child))
        # Sent apart from the start, which is for what is small.
        for worker in self.workers:
            self._send(worker, job)

    def end(self) -> None:
        """End and join every worker."""
        for worker in self.workers:
            worker.connection.close()
        end_children([worker.child for worker in self.workers], GRACE)

    def give(self, worker: Worker, index: int, data: bytes, name: str) -> None:
        """Hand out an item, pickled. Raises WorkerFailed where the worker has died."""
        worker.index, worker.doing = index, name
        self._send(worker, data)

    def speaking(self, seconds: float) -> Sequence[Worker]:
        """Those that have something to say or have died; waits for the first, up to `seconds`."""
        ready = wait([worker.connection for worker in self.workers], seconds)
        return [worker for worker in self.workers if worker.connection in ready]

    def receive(self, worker: Worker) -> tuple[int, bytes] | None:
        """Index and pickled result of the item that a worker is done with, which is then idle.

        None where it has only been set up. Raises WorkerFailed for its death or an exception in
        it; a PacelineError that it raised is raised here as it is.
        """
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._raise_death(worker)
        if isinstance(message, Raised):
            self._raise(worker, message)
        index, worker.index, worker.doing = worker.index, None, "waiting for an item"
        if isinstance(message, Done) and index is not None:
            return index, message.result
        return None

    def _send(self, worker: Worker, data: bytes) -> None:
        try:
            worker.connection.send_bytes(data)
        except OSError:
            self._raise_death(worker)

    def _raise(self, worker: Worker, message: Raised) -> NoReturn:
        if message.error is not None:
            error = pickle.loads(message.error)
            error.add_note(f"in worker {worker.number}, while {worker.doing}")
            raise error
        raise WorkerFailed(
            f"worker {worker.number}, {worker.doing}: {message.doing} failed: {message.summary}\n"
            f"{message.trace.rstrip()}"
        )

    def _raise_death(self, worker: Worker) -> NoReturn:
        worker.child.wait(GRACE)
        how = worker.child.how_it_ended()
        raise WorkerFailed(f"worker {worker.number} {how} while {worker.doing}")


def name_of(index: int, item: Any) -> str:
    """An item in words, cut to a readable length."""
    text = repr(item)
    if len(text) > _NAME_LIMIT:
        text = text[:_NAME_LIMIT] + "..."
    return f"item {index} ({text})"


def result_of(data: bytes, name: str) -> Any:
    """A result as the worker returned it. Raises WorkerFailed where it cannot be read."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WorkerFailed(f"the result of {name} cannot be read: {summary_of(error)}") from error


def _work(end: socket.socket, threads: int) -> None:
    """Run in a worker until the parent ends it or is gone."""
    connection: Connection = Connection(end.detach())
    doing = "loading the setup function"
    try:
        setup, payload = pickle.loads(connection.recv_bytes())
        # Work that needs no torch should not wait for its import; torch loaded later goes by
        # OMP_NUM_THREADS.
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        doing = "the setup"
        handle = setup(payload)
        connection.send_bytes(pickle.dumps(Ready()))
        while True:
            item = pickle.loads(connection.recv_bytes())
            doing = "the work"
            result = handle(item)
            doing = "pickling the result"
            message = pickle.dumps(Done(pickle.dumps(result, pickle.HIGHEST_PROTOCOL)))
            connection.send_bytes(message)
            del item, result, message
    except EOFError:
        return
    except BaseException as error:  # noqa: BLE001
        _report(connection, error, doing)
        raise SystemExit(1) from None


def _report(connection: Connection, error: BaseException, doing: str) -> None:
    message = raised(error, doing)
    try:
        connection.send_bytes(pickle.dumps(message))
    except OSError:
        sys.stderr.write(message.trace)
