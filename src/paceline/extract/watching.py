"""Calls of the extraction's own process that do not return, while no supervisor looks after it."""

from collections.abc import Mapping
from typing import Any

from paceline.durable.iowatch import IoWatch
from paceline.flow.stuck import OwnWatch
from paceline.flow.units import Policy
from paceline.watch.events import EventWriter

_NAMES = {"kind": "wait", "pid": "worker_pid"}
"""Fields of the supervisor's events whose names every event has for something else."""


def event_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of one of the supervisor's events, as the extraction's have them."""
    return {_NAMES.get(name, name): value for name, value in fields.items()}


def looked_after(watch: IoWatch, events: EventWriter) -> OwnWatch:
    """While it is entered, calls inside `watch.call` that do not return are told of.

    Before and after the supervisor's work, which does so itself: a mount that has frozen shows
    when what is there is looked at.
    """

    def report(kind: Any, fields: dict[str, Any]) -> None:
        events.emit(kind, **event_fields(fields))

    return OwnWatch(watch, Policy().stuck_after, report)
