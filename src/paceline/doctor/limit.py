"""Calls that may never return, waited for only so long."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """One call, at work in a thread of its own from the start; the thread never keeps Python alive.

    For what a thread can wait for. A read from a dead mount would hold the process itself beyond
    its end: such a path is looked at by a process of its own (`touch`).
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> T:
        """Its value. Raises TimeoutError where it is late, and what the call itself raises."""
        if not self._done.wait(max(0.0, seconds)):
            raise TimeoutError(f"no answer within {seconds:g} s")
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
