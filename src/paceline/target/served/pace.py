"""How patient requests are: pauses, and what counts as how many failures."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds and counts; the defaults suit servers that answer in seconds."""

    retry_first: float = 0.5
    """Pause before the second try of a prompt; each further one doubles it."""
    retry_longest: float = 30.0
    other_first: float = 2.0
    """For so long after the pause another endpoint, where one answers, may take the prompt over."""
    opens_after: int = 5
    """Failures in a row that open an endpoint's breaker."""
    open_first: float = 1.0
    """Pause of an open breaker; each failed probe doubles it."""
    open_longest: float = 60.0
    longest_retry_after: float = 300.0
    """However long a server asks to be left alone."""
    first_rejections: int = 8
    """So many prompts rejected, and none answered, mean that the requests are wrong, not they."""
    first_useless: int = 20
    """So many answers with one fault, and none without, mean that the server is wrong."""
    grace: float = 15.0
    """How long a signal lets requests in flight go on."""
    glance: float = 0.1
    """Between two looks at what is due."""


def grown(first: float, longest: float, times: int, random: Random) -> float:
    """The pause after `times` failures (1 or more), between a half and the whole of its length."""
    whole = min(longest, first * 2 ** min(times - 1, 30))
    return whole * (0.5 + random.random() / 2)
