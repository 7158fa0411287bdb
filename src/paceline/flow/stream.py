"""One function over a stream of items, in worker processes; results in the order of the items."""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

from paceline.flow.messages import sendable
from paceline.flow.pool import Pool, result_of

P = TypeVar("P")
I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_AHEAD = 3
"""Items for each worker that are handed out or done before their turn: what bounds memory."""

_GLANCE = 0.2
"""Seconds between two chances for a signal to be raised."""


def map_stream(
    setup: Callable[[P], Callable[[I], R]],
    payload: P,
    items: Iterable[I],
    *,
    workers: int,
    name: Callable[[I], str],
) -> Generator[R, None, None]:
    """Apply a function to every item of a stream, in `workers` processes of one thread each.

    `setup(payload)` runs once per process and returns the function; it is a module's top-level
    function, so that a spawned process can import it. With one worker all of it happens in this
    process, and no other is started. Results come in the order of the items, whatever the number
    of workers; a few items per worker are taken from the stream before their turn. `name` says of
    an item what it is, for errors.

    Raises WorkerFailed for an exception in a worker, or its death; a PacelineError raised in a
    worker is raised here as it is. The workers have ended when the iterator has, or is closed.
    """
    if workers < 1:
        raise ValueError(f"map_stream: workers {workers} must be 1 or more")
    if workers == 1:
        handle = setup(payload)
        for item in items:
            yield handle(item)
        return
    pool = Pool(workers, threads=1)
    try:
        pool.start(sendable((setup, payload), "the setup function and its payload"))
        yield from _in_order(pool, iter(items), name)
    finally:
        pool.end()


def _in_order(pool: Pool, items: Iterator[Any], name: Callable[[Any], str]) -> Iterator[Any]:
    idle = []
    done: dict[int, bytes] = {}
    names: dict[int, str] = {}
    handed_out = turn = 0
    is_ended = False
    while True:
        while idle and not is_ended and handed_out - turn < _AHEAD * len(pool.workers):
            try:
                item = next(items)
            except StopIteration:
                is_ended = True
                break
            names[handed_out] = name(item)
            data = sendable(item, names[handed_out])
            pool.give(idle.pop(), handed_out, data, names[handed_out])
            handed_out += 1
        if is_ended and turn == handed_out:
            return
        # Workers first: while this process looks at a result, none of them should wait.
        for worker in pool.speaking(0 if turn in done else _GLANCE):
            finished = pool.receive(worker)
            idle.append(worker)
            if finished is not None:
                done[finished[0]] = finished[1]
        if turn in done and (
            not idle or is_ended or handed_out - turn >= _AHEAD * len(pool.workers)
        ):
            yield result_of(done.pop(turn), names.pop(turn))
            turn += 1
