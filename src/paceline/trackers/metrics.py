"""Events of a training as points of curves, and as notes."""

import math
from collections.abc import Mapping
from typing import Any

from paceline.recipe.fingerprint import flatten

_STEP_FIELDS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "samples": "train/samples",
    "tokens": "train/tokens",
    "rate": "train/tokens_per_s",
}


def metrics_of(kind: str, event: Mapping[str, Any]) -> dict[str, float]:
    """What an event says in numbers, by name; only finite ones."""
    found: dict[str, Any] = {}
    if kind in ("step", "skipped_step"):
        found = {name: event.get(field) for field, name in _STEP_FIELDS.items()}
        found["train/skipped_samples"] = event.get("quarantined", {}).get("skipped_step", 0)
        found |= {f"train/{name}": mean for name, mean in _means(event).items()}
    elif kind == "evaluation":
        found = {f"eval/tau/{name}": tau for name, tau in event["simulated_tau"].items()}
    elif kind == "finished":
        found = {f"report/{name}": value for name, value in flatten(event["report"]).items()}
    return {name: float(value) for name, value in found.items() if _is_number(value)}


def note_of(kind: str, event: Mapping[str, Any]) -> str:
    """What an event says in words; empty where its numbers say all."""
    if kind == "skipped_step":
        return f"step {event['step']} changed nothing: {event.get('reason')}"
    if kind == "override":
        return (
            f"{event['key']} changes from {event['made']!r} to {event['asked']!r} at step "
            f"{event['step']}"
        )
    if kind in ("failed", "interrupted"):
        return f"{kind}: {event['error']}"
    if kind == "finished":
        return f"best checkpoint: {event['report']['best']}"
    return ""


def _means(event: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the loss: sums that have a count of their own."""
    counts = {name: event.get(f"{name}_count") for name in event}
    return {name: event[name] / count for name, count in counts.items() if count}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
