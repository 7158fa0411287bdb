"""How often, and after which pauses, a worker that dies is started again."""

from collections import deque

_LONGEST = 60.0


class Patience:
    """Of one worker: `restarts` within `window` seconds; pauses double from `backoff` on."""

    def __init__(self, *, restarts: int, window: float, backoff: float) -> None:
        self._restarts = restarts
        self._window = window
        self._backoff = backoff
        self._failures = 0
        self._granted: deque[float] = deque()

    def after_death(self, now: float) -> float | None:
        """Seconds until the next start, at most 60; None where the worker is to give up."""
        while self._granted and now - self._granted[0] >= self._window:
            self._granted.popleft()
        if len(self._granted) >= self._restarts:
            return None
        self._granted.append(now)
        # 2 ** 16 is beyond the longest already, and floats end.
        pause = min(_LONGEST, self._backoff * 2 ** min(self._failures, 16))
        self._failures += 1
        return pause

    def succeeded(self) -> None:
        """It has made a unit: the next pause is the first again. What was granted still counts."""
        self._failures = 0
