"""Whether an endpoint is of any use: what it says before its first useful answer is held back."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.target.served.pace import Pace

REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Taken:
    """What was made of an answer."""

    answer: Any
    """To be kept."""
    tokens: int
    """Generated."""
    fault: str = ""
    """A word for what is wrong with it, where that is the server's making; empty where nothing."""
    said: str = ""
    """The fault in words."""


@dataclass(frozen=True, slots=True)
class Held:
    """A prompt whose outcome is not kept yet."""

    job: Any
    taken: Taken | None
    """None where the server rejects the prompt."""
    said: str


@dataclass(slots=True)
class Trial:
    """Of one endpoint; over with its first answer of use. Holds a few dozen prompts at most."""

    is_over: bool = False
    _held: list[Held] = field(default_factory=list)
    _faults: Counter[str] = field(default_factory=Counter)

    def hold(self, held: Held, pace: Pace) -> str:
        """Hold it back; what is wrong with the endpoint, once that is plain, else empty."""
        self._held.append(held)
        fault = REJECTED if held.taken is None else held.taken.fault
        self._faults[fault] += 1
        count = self._faults[fault]
        if fault == REJECTED:
            if count >= pace.first_rejections:
                return f"answered none and rejected the first {count} prompts: {held.said}"
        elif count >= pace.first_useless:
            return f"its first {count} answers are of no use, for one reason: {held.said}"
        return ""

    def release(self) -> list[Held]:
        """What was held, which no longer is."""
        held, self._held = self._held, []
        self._faults.clear()
        return held
