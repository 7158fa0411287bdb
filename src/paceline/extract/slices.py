"""The part of an extraction that one of several machines does."""

import re
from dataclasses import dataclass

from paceline.durable.errors import UserError

_FORM = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Slice:
    """Every `count`-th unit, from `index` (1 to `count`) on."""

    index: int = 1
    count: int = 1

    def holds(self, unit: int) -> bool:
        """Whether the unit of this index is of this slice."""
        return unit % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def told(self) -> str:
        """As events tell it: empty where one machine does it all."""
        return str(self) if self.count > 1 else ""


ALL = Slice()
"""One machine does it all."""


def parse_slice(text: str) -> Slice:
    """`2/4` is the second of four. Raises UserError for anything else."""
    found = _FORM.fullmatch(text)
    if found is not None:
        index, count = int(found[1]), int(found[2])
        if 1 <= index <= count:
            return Slice(index, count)
    raise UserError(
        f"--shard {text}: give this machine's number and how many there are, such as 1/4, 2/4, "
        "3/4 and 4/4 on four machines."
    )
