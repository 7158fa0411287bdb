"""What the supervisor of an extraction tells, and who looks after its process before and after."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from paceline.durable.iowatch import IoWatch
from paceline.durable.limit import Call
from paceline.durable.patience import Patience, PatientStore
from paceline.durable.store import Store
from paceline.durable.watched_store import WatchedStore
from paceline.flow.stuck import OwnWatch
from paceline.flow.units import Policy
from paceline.recipe.schema import ExtractRecipe
from paceline.watch.events import EventWriter

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_NAMES = {"kind": "wait", "pid": "worker_pid"}
"""Fields of the supervisor's events whose names every event has for something else."""


def tell_event(events: EventWriter, command: str, kind: Any, fields: Mapping[str, Any]) -> None:
    """Pass on one of the supervisor's events, and tell of waits; from any thread."""
    events.emit(kind, **{_NAMES.get(name, name): value for name, value in fields.items()})
    match kind:
        case "waiting":
            _LOG.warning("%s: waiting: %s", command, fields["reason"])
        case "going_on":
            _LOG.info("%s: going on after %.0f s", command, fields["seconds"])


def patience_of(recipe: ExtractRecipe, events: EventWriter) -> Patience:
    """How long the extraction waits for its store, and how it tells of that."""
    tell = partial(tell_event, events, "extract")
    return Patience(
        recipe.space_wait,
        lambda kind, reason: tell("waiting", {"kind": kind, "reason": reason}),
        lambda kind, seconds: tell("going_on", {"kind": kind, "seconds": round(seconds, 1)}),
    )


def asked_store(store: Store, recipe: ExtractRecipe, watch: IoWatch, events: EventWriter) -> Store:
    """The store of an extraction for all but uploads: waited for, and its calls known."""
    return PatientStore(WatchedStore(store, watch), patience_of(recipe, events))


def apart(function: Callable[[], T]) -> T:
    """Its value; a signal ends the wait at once, whatever a store or a disk is at.

    A handler runs in the main thread alone, and not while that is in a call of a client. What is
    left behind in its thread ends with the process.
    """
    return Call(function, "paceline-apart").finish()


def looked_after(watch: IoWatch, events: EventWriter) -> OwnWatch:
    """While it is entered, calls inside `watch.call` that do not return are told of.

    Before and after the supervisor's work, which does so itself: a mount that has frozen shows
    when what is there is looked at.
    """
    return OwnWatch(watch, Policy().stuck_after, partial(tell_event, events, "extract"))
