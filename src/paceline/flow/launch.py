"""Worker processes: one function over many items, and no failure that hangs or goes unnamed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.durable.errors import PacelineError, WorkerFailed, storage_refused
from paceline.flow.messages import sendable, summary_of
from paceline.flow.pool import Pool, name_of, result_of
from paceline.flow.signals import Stop, signals_noted

P = TypeVar("P")
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_GLANCE = 0.2
"""Seconds between two looks for a signal, which does not end a wait for workers."""

_IN_WORK = "what is in work"


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
        pool = Pool(count, threads)
        with signals_noted(_IN_WORK) as stop:
            try:
                pool.start(sendable((setup, payload), "the setup function and its payload"))
                done = _run(pool, items, on_result, stop)
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
                with _failure_named(name_of(index, item)):
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


def _run(
    pool: Pool, items: Sequence[Any], on_result: Callable[[Any, Any], None], stop: Stop
) -> int:
    """How many items are done: all of them, unless a signal asked for the end."""
    handed_out = 0
    unfinished = len(items)
    while unfinished:
        if stop.asked and all(worker.index is None for worker in pool.workers):
            break
        for worker in pool.speaking(_GLANCE):
            done = pool.receive(worker)
            # The worker gets its next item before the result is looked at, so it never waits for
            # what this process does with it.
            if handed_out < len(items) and not stop.asked:
                name = name_of(handed_out, items[handed_out])
                pool.give(worker, handed_out, sendable(items[handed_out], name), name)
                handed_out += 1
            if done is not None:
                index, result = done
                on_result(items[index], result_of(result, name_of(index, items[index])))
                unfinished -= 1
    return len(items) - unfinished
