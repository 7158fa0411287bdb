"""TensorBoard: event files in `tensorboard/` of the run directory."""

import json
import os
import time
from typing import Any

from paceline.trackers.tracker import RunIdentity

FOLDER = "tensorboard"
"""In the run directory. `tensorboard --logdir runs` shows all runs beside each other."""

_FLUSH_EVERY = 1.0
"""Seconds. Each flush is a sync of the file."""


class TensorBoard:
    """Event files, written with tensorboardX, which needs no torch.

    Its writer without a thread is used: errors come back to the caller.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._events: Any = None
        self._flushed = 0.0

    def start(self, run: RunIdentity, config: dict[str, Any]) -> None:
        """Open a new event file, which takes the place of earlier ones behind `run.step`."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._events = event_pb2
        folder = run.folder / FOLDER
        folder.mkdir(exist_ok=True)
        # Files are read in the order of their names, which else hold no more than the second.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}.{os.getpid()}")
        # Readers leave out what earlier files say of this step and later ones.
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(run.step + 1 if run.step else 0, session_log=restart)
        self.note(run.step, f"```\n{json.dumps(config, indent=1)}\n```", name="recipe")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """A scalar for each metric."""
        from tensorboardX.proto import summary_pb2

        summaries: Any = summary_pb2
        values = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
        self._write(step, summary=summaries.Summary(value=values))

    def note(self, step: int, text: str, *, name: str = "note") -> None:
        """A text, rendered as Markdown."""
        from tensorboardX.summary import text as text_summary

        self._write(step, summary=text_summary(name, text))

    def finish(self, outcome: str) -> None:  # noqa: ARG002
        """Close the file; it has no place for how a run ended."""
        self._writer.flush()
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.write_event(self._events.Event(step=step, wall_time=time.time(), **what))
        if time.monotonic() - self._flushed > _FLUSH_EVERY:
            self._writer.flush()
            self._flushed = time.monotonic()
