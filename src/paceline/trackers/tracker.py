"""What every tracker does, and what it is told of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """A run as a tracker knows it."""

    id: str
    """32 hex digits. The same id is the same run, however often it was stopped and resumed."""
    name: str
    """For people; unique in the project."""
    project: str
    folder: Path
    """The run directory."""
    step: int
    """Optimizer steps done; what was told of later ones will be told again."""


class Tracker(Protocol):
    """One place where curves are shown.

    All calls come from one thread, and may raise whatever they like and take as long as they do.
    Values are finite. Steps rise, except that a resumed run goes on from an earlier one.
    """

    def start(self, run: RunIdentity, config: dict[str, Any]) -> None:
        """Open the run, or go on with it; called again after an error.

        `config` is the recipe as plain values, masked.
        Raises ModuleNotFoundError where the tracker's library is not installed.
        """
        ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add points to the curves."""
        ...

    def note(self, step: int, text: str) -> None:
        """Keep a sentence beside the curves."""
        ...

    def finish(self, outcome: str) -> None:
        """Send the rest and close the run: `finished`, `failed` or `interrupted`."""
        ...
