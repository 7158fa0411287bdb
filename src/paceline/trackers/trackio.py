"""trackio: W&B's interface over a local database, a Space of Hugging Face, or a server."""

from collections.abc import Mapping
from typing import Any

from paceline.trackers.tracker import RunIdentity


class Trackio:
    """A trackio run, known by its name."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._run: Any = None
        self._step = 0

    def start(self, run: RunIdentity, config: dict[str, Any]) -> None:
        """Open or resume the run."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=run.project,
            name=run.name,
            resume="allow",
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **self._options,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Points at a step."""
        self._step = step
        self._run.log(metrics, step=step)

    def note(self, step: int, text: str) -> None:
        """A text at a step."""
        self._run.log({"note": text}, step=step)

    def finish(self, outcome: str) -> None:
        """Write the rest, with how the run ended."""
        self._run.log({"outcome": outcome}, step=self._step)
        self._run.finish()
