"""Worker processes: one function over many items, and no failure that hangs or goes unnamed."""

import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

from paceline.durable.errors import PacelineError, WorkerFailed, storage_refused
from paceline.flow.messages import Raised, Ready, raised, sendable, summary_of
from paceline.flow.process import GRACE, Child, end_children, environment_of, start_child
from paceline.flow.signals import Stop, signals_noted

P = TypeVar("P")
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_GLANCE = 0.2
"""Seconds between two looks for a signal, which does not end a wait for workers."""

_IN_WORK = "what is in work"

_NAME_LIMIT = 160


@dataclass(frozen=True)
class _Done:
    result: bytes


def map_items(
    setup: Callable[[P], Callable[[I], R]],
    payload: P,
    items: Sequence[I],
    *,
    workers: int,
    threads: int,
    on_result: Callable[[I, R], None],
    what: str = "items",
) -> None:
    """Apply a function to every item in `workers` processes of `threads` CPU threads each.

    `setup(payload)` runs once per worker and returns the function; it is a module's top-level
    function, so that a spawned process can import it. Items are handed out one at a time, in
    order, to whichever worker is free, and each result reaches `on_result(item, result)` in the
    calling thread as it comes, so in no fixed order. With one worker, or one item, all of it
    happens in this process.

    On SIGTERM or SIGINT no further item is handed out, those in work are finished and reach
    `on_result`, and Interrupted is raised, which calls the items `what`; a second signal raises
    KeyboardInterrupt at once. While the setup runs in this process, signals are the caller's.

    Raises WorkerFailed, naming the item, for an exception in a worker (its traceback is part of
    the message), for a worker that died (with its signal or exit code), and for an item or a
    result that cannot be pickled; a PacelineError raised in a worker is raised here as it is, and
    what a worker's disk refuses as StorageRefused.
    Whatever ends this call, an exception of `on_result` and Ctrl-C included, its workers have
    ended when it returns, and they die with this process however it dies.
    """
    if workers < 1 or threads < 1:
        raise ValueError(f"map_items: workers {workers} and threads {threads} must be 1 or more")
    count = min(workers, len(items))
    if count == 1:
        _map_inline(setup, payload, items, threads, on_result, what)
    elif count > 1:
        pool = _Pool(count, threads)
        with signals_noted(_IN_WORK) as stop:
            try:
                pool.start(sendable((setup, payload), "the setup function and its payload"))
                done = pool.run(items, on_result, stop)
            finally:
                pool.end()
            _end_if_asked(stop, done, len(items), what)


def _map_inline(
    setup: Callable[[P], Callable[[I], R]],
    payload: P,
    items: Sequence[I],
    threads: int,
    on_result: Callable[[I, R], None],
    what: str,
) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _failure_named("setting up"):
            handle = setup(payload)
        with signals_noted(_IN_WORK) as stop:
            for index, item in enumerate(items):
                with _failure_named(_name(index, item)):
                    result = handle(item)
                on_result(item, result)
                _end_if_asked(stop, index + 1, len(items), what)
    finally:
        torch.set_num_threads(before)


def _end_if_asked(stop: Stop, done: int, count: int, what: str) -> None:
    if stop.asked:
        raise stop.interrupted(f"stopped after {done:,} of the {count:,} {what} that were left")


@contextmanager
def _failure_named(doing: str) -> Iterator[None]:
    try:
        yield
    except PacelineError as error:
        error.add_note(f"while {doing}")
        raise
    except Exception as error:
        refused = storage_refused(error) if isinstance(error, OSError) else None
        if refused is not None:
            refused.add_note(f"while {doing}")
            raise refused from error
        raise WorkerFailed(f"{doing} failed: {summary_of(error)}") from error


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, number: int, child: Child) -> None:
        self.number = number
        self.child = child
        self.connection: Connection = Connection(child.socket.detach())
        self.index: int | None = None
        """Of the item it is working on; None while it sets up and when it is idle."""
        self.is_set_up = False


class _Pool:
    def __init__(self, count: int, threads: int) -> None:
        self._count = count
        self._threads = threads
        self._workers: list[_Worker] = []

    def start(self, job: bytes) -> None:
        for number in range(self._count):
            child = start_child(
                _work,
                (self._threads,),
                name=f"paceline-worker-{number}",
                environment=environment_of(self._threads),
            )
            self._workers.append(_Worker(number, child))
        # Sent apart from the start, which is for what is small.
        for worker in self._workers:
            self._send(worker, job, "setting up")

    def run(self, items: Sequence[Any], on_result: Callable[[Any, Any], None], stop: Stop) -> int:
        """How many items are done: all of them, unless a signal asked for the end."""
        handed_out = 0
        unfinished = len(items)
        by_connection = {worker.connection: worker for worker in self._workers}
        while unfinished:
            if stop.asked and all(worker.index is None for worker in self._workers):
                break
            for connection in wait(list(by_connection), _GLANCE):
                worker = by_connection[connection]  # type: ignore[index]
                finished = worker.index
                message = self._receive(worker, items)
                worker.is_set_up = True
                worker.index = None
                # The worker gets its next item before the result is looked at, so it never
                # waits for what this process does with it.
                if handed_out < len(items) and not stop.asked:
                    name = _name(handed_out, items[handed_out])
                    data = sendable(items[handed_out], name)
                    worker.index = handed_out
                    handed_out += 1
                    self._send(worker, data, name)
                if isinstance(message, _Done) and finished is not None:
                    result = _loads(message.result, _name(finished, items[finished]))
                    on_result(items[finished], result)
                    unfinished -= 1
        return len(items) - unfinished

    def end(self) -> None:
        """End and join every worker."""
        for worker in self._workers:
            worker.connection.close()
        end_children([worker.child for worker in self._workers], GRACE)

    def _send(self, worker: _Worker, data: bytes, doing: str) -> None:
        try:
            worker.connection.send_bytes(data)
        except OSError:
            self._raise_death(worker, doing)

    def _receive(self, worker: _Worker, items: Sequence[Any]) -> Ready | _Done:
        doing = "waiting for an item" if worker.is_set_up else "setting up"
        if worker.index is not None:
            doing = _name(worker.index, items[worker.index])
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._raise_death(worker, doing)
        if isinstance(message, Raised):
            self._raise(worker, message, doing)
        return message

    def _raise(self, worker: _Worker, message: Raised, doing: str) -> NoReturn:
        if message.error is not None:
            error = pickle.loads(message.error)
            error.add_note(f"in worker {worker.number}, while {doing}")
            raise error
        raise WorkerFailed(
            f"worker {worker.number}, {doing}: {message.doing} failed: {message.summary}\n"
            f"{message.trace.rstrip()}"
        )

    def _raise_death(self, worker: _Worker, doing: str) -> NoReturn:
        worker.child.wait(GRACE)
        how = worker.child.how_it_ended()
        raise WorkerFailed(f"worker {worker.number} {how} while {doing}")


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
            message = pickle.dumps(_Done(pickle.dumps(result, pickle.HIGHEST_PROTOCOL)))
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


def _loads(data: bytes, name: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WorkerFailed(f"the result of {name} cannot be read: {summary_of(error)}") from error


def _name(index: int, item: Any) -> str:
    text = repr(item)
    if len(text) > _NAME_LIMIT:
        text = text[:_NAME_LIMIT] + "..."
    return f"item {index} ({text})"
