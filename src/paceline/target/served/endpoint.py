"""One endpoint's state: its circuit breaker, and what is counted of it."""

import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from paceline.target.served.client import Client
from paceline.target.served.pace import Pace, grown
from paceline.target.served.replies import Failed

State = Literal["open", "checking", "half-open", "trying", "closed", "out"]
"""`open`: left alone until `due`, as at the start; `checking`: asked for its models; `half-open`:
one prompt may be put to it; `trying`: that is under way; `closed`: in use; `out`: unusable."""


@dataclass(eq=False, slots=True)
class Streak:
    """Failures of an endpoint between two answers."""

    length: int = 0
    is_down: bool = False
    """The endpoint as a whole did not answer."""
    is_seen: bool = False
    """It answered another prompt afterwards, or at least listed its models."""

    @property
    def is_of_prompts(self) -> bool:
        """Whether the prompts alone can have been the cause."""
        return self.is_seen and not self.is_down


@dataclass(slots=True)
class Stats:
    """What an endpoint did in this process."""

    asked: int = 0
    answered: int = 0
    rejected: int = 0
    retried: int = 0
    """Of those asked: prompts that had failed before, there or elsewhere."""
    failed: Counter[str] = field(default_factory=Counter)
    """By kind; asked = answered + rejected + failed + in flight + those of no use."""
    openings: int = 0
    """Of its breaker."""
    tokens: int = 0
    """Generated, in answers."""
    waited: float = 0.0
    """Seconds, over all answers, from request to answer."""
    began: float | None = None
    ended: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, from the first request to the last answer."""
        seconds = 0.0 if self.began is None else self.ended - self.began
        return self.tokens / seconds if seconds > 0 else 0.0


class Endpoint:
    """A server, how it fares, and whether it may be asked now."""

    def __init__(self, client: Client, concurrency: int, pace: Pace, random: Random) -> None:
        self.client = client
        self.model = ""
        """What it calls the target; known from its first check on."""
        self.stats = Stats()
        self.state: State = "open"
        self.due = 0.0
        """When an open breaker lets a probe through."""
        self.in_flight = 0
        self.said = "has not been asked yet"
        """What it said last, where that was no answer."""
        self.silent_since: float | None = None
        """Since when it fails; None while it answers."""
        self.streak = Streak()
        self._concurrency = concurrency
        self._pace = pace
        self._random = random
        self._pauses = 0
        self._busy = 0
        self._quiet_until = 0.0

    @property
    def url(self) -> str:
        """Where it is."""
        return self.client.url

    @property
    def is_usable(self) -> bool:
        """Whether it is in use."""
        return self.state == "closed"

    def room(self, now: float) -> int:
        """Requests that it may be sent on top of those in flight."""
        if now < self._quiet_until:
            return 0
        if self.state == "half-open":
            return 1
        return self._concurrency - self.in_flight if self.state == "closed" else 0

    def needs_check(self, now: float) -> bool:
        """Whether it is time to see if it is there."""
        return self.state == "open" and now >= max(self.due, self._quiet_until)

    def checked(self, model: str) -> None:
        """It is there. One that had failed has to answer a prompt before it gets more of them."""
        self.model = model
        self.state = "closed" if self.silent_since is None else "half-open"
        if self.state == "closed":
            self._pauses = 0

    def sent(self, *, is_retry: bool) -> None:
        """Count a request."""
        if self.state == "half-open":
            self.state = "trying"
        if self.stats.began is None:
            self.stats.began = time.monotonic()
        self.in_flight += 1
        self.stats.asked += 1
        self.stats.retried += is_retry

    def heard(self, seconds: float, *, tokens: int | None) -> bool:
        """Count an answer, or a rejection (no tokens); True where its breaker closes by it."""
        if tokens is None:
            self.stats.rejected += 1
        else:
            self.stats.answered += 1
            self.stats.tokens += tokens
            self.stats.waited += seconds
            self.stats.ended = time.monotonic()
        self.streak.is_seen = True
        self.streak = Streak()
        self.silent_since = None
        self._pauses = self._busy = 0
        closes = self.state in ("open", "checking", "half-open", "trying")
        if self.state != "out":
            self.state = "closed"
        return closes

    def was_seen(self) -> None:
        """It is there, whatever becomes of the prompts that are left."""
        self.streak.is_seen = True
        self.silent_since = None

    def failed(self, failure: Failed, now: float, *, is_check: bool = False) -> bool:
        """Count a failure; True where its breaker opens by it, or stays open after a probe."""
        self.stats.failed[failure.kind] += not is_check
        self.said = failure.message
        if self.silent_since is None:
            self.silent_since = now
        self._pause(failure, now)
        self.streak.length += 1
        # A server that is busy answers others: whoever is told so waits, and nothing is broken.
        is_over = self.streak.length >= self._pace.opens_after and not failure.retry_after
        if self.state == "out" or not (
            failure.kind == "connect" or is_over or self.state in ("checking", "trying")
        ):
            return False
        self.streak.is_down = True
        if self.state == "open":
            # Those that were in flight when it opened.
            return False
        self.stats.openings += self.state == "closed"
        self.state = "open"
        self._pauses += 1
        pause = grown(self._pace.open_first, self._pace.open_longest, self._pauses, self._random)
        self.due = now + pause
        return True

    def _pause(self, failure: Failed, now: float) -> None:
        pause = failure.retry_after
        if pause is None and failure.kind == "status 429":
            self._busy += 1
            pause = grown(
                self._pace.retry_first, self._pace.retry_longest, self._busy, self._random
            )
        if pause is not None:
            until = now + min(pause, self._pace.longest_retry_after)
            self._quiet_until = max(self._quiet_until, until)

    def put_out(self, why: str) -> None:
        """It answers nothing, and will not before somebody mends it."""
        self.said = why
        self.state = "out"

    def numbers(self) -> dict[str, Any]:
        """JSON values for events and the report."""
        stats = self.stats
        mean = stats.waited / stats.answered if stats.answered else None
        return {
            "url": self.url,
            "state": self.state,
            "asked": stats.asked,
            "answered": stats.answered,
            "rejected": stats.rejected,
            "failed": {kind: n for kind, n in sorted(stats.failed.items()) if n},
            "retried": stats.retried,
            "tokens": stats.tokens,
            "tokens_per_second": round(stats.rate, 2),
            "mean_seconds": None if mean is None else round(mean, 3),
            "openings": stats.openings,
        }

    def line(self) -> str:
        """For the terminal."""
        stats, parts = self.stats, [f"{self.stats.asked} asked", f"{self.stats.answered} answered"]
        if stats.rejected:
            parts.append(f"{stats.rejected} rejected")
        if stats.failed.total():
            kinds = ", ".join(
                f"{count} {kind}" for kind, count in stats.failed.most_common() if count
            )
            parts.append(f"{stats.failed.total()} failed ({kinds})")
        if stats.retried:
            parts.append(f"{stats.retried} of them second tries")
        if stats.answered:
            mean = stats.waited / stats.answered
            parts.append(f"{stats.tokens} tokens, {stats.rate:.1f} tokens/s, {mean:.2f} s each")
        if stats.openings:
            parts.append(f"left alone {stats.openings} times")
        end = f"; out: {self.said}" if self.state == "out" else ""
        return f"{self.url}: {', '.join(parts)}{end}"
