"""Calls that may never return, in threads that do not keep the process from ending."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Call(Generic[T]):
    """One call, at work in a thread of its own from the start; the thread never keeps Python alive.

    For what a thread can wait for. A read from a dead mount would hold the process itself beyond
    its end: such a path is looked at by a process of its own.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> T:
        """Its value. Raises TimeoutError where it is late, and what the call itself raises."""
        if not self.wait(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        return self.finish()

    def wait(self, seconds: float) -> bool:
        """Whether it has returned, or raised, after at most so long."""
        return self._done.wait(max(0.0, seconds))

    def finish(self) -> T:
        """Its value, however late; signals are heard meanwhile. Raises what the call raises."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for the value
            self._error = error
        finally:
            self._done.set()


def mapped(function: Callable[[S], T], items: Sequence[S], threads: int) -> Iterator[T]:
    """The values of all items in their order, computed side by side.

    As an executor's `map`, but for its threads: an executor's are waited for when Python ends.
    Raises what the first item in the order raises; what is in work then is left, and no more begun.
    """
    futures: list[Future[T]] = [Future() for _ in items]
    left = iter(zip(items, futures, strict=True))
    lock, over = threading.Lock(), threading.Event()

    def work() -> None:
        while not over.is_set():
            with lock:
                item, future = next(left, (None, None))
            if future is None:
                return
            try:
                future.set_result(function(item))  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001  handed to whoever waits for the value
                future.set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, name="paceline-mapped", daemon=True).start()
    try:
        for future in futures:
            yield future.result()
    finally:
        over.set()
