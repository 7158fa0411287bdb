"""An online training: what both of its sides reach, and how devices are best split among them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.doctor.plan_bytes import Samples
from paceline.doctor.plan_facts import Facts
from paceline.doctor.plan_rates import Rate
from paceline.flow.balance import split_devices, training_time
from paceline.recipe.online import capture_devices, training_devices
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.watch.tail import last_events
from paceline.watch.words import counted, duration, number, short_bytes

TARGET_RATE = "target_rate"
"""In an event of the training, or in its report: tokens per second of one target that never
waits."""

DRAFTER_RATE = "drafter_rate"
"""The same of one drafter."""

Slower = Literal["targets", "drafters", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The devices of a recipe, split so that the training is fastest."""

    targets: int
    drafters: int
    tokens_per_s: float
    """Of the whole training then."""


@dataclass(frozen=True, kw_only=True)
class OnlinePlan:
    """The training, in which targets and drafters work side by side."""

    targets: tuple[str, ...]
    """Devices, a process each."""
    drafters: tuple[str, ...]
    samples: Samples
    """Captured while training and never stored."""
    tokens: int
    """Of these samples, over all epochs."""
    queue_bytes: int
    """Of memory, for what waits."""
    is_kept: bool
    """Whether later epochs read what the first one captured."""
    target_tokens_per_s: Rate
    """Of one that never waits."""
    drafter_tokens_per_s: Rate
    slower: Slower
    """The side that decides how long it takes."""
    seconds: float | None
    """Of the whole training, evaluations left out; None where a speed is not known."""
    at_least: float | None
    """The same by the speed that is known."""
    best: Split | None
    """Of as many devices; None where a speed is not known, or a device does both."""


def online_plan(recipe: Recipe, facts: Facts, extraction: Rate) -> OnlinePlan | None:
    """None offline. `extraction` is the speed of all devices of the extraction together."""
    targets, drafters = capture_devices(recipe), training_devices(recipe.train)
    samples = facts.asked.online
    if not targets or samples is None:
        return None
    tokens = max(1, round(recipe.train.epochs * samples.tokens))
    one = _target_rate(recipe, facts.run_dir, extraction)
    other = _drafter_rate(facts.asked.drafter_tokens_per_s, facts.run_dir)
    rates: dict[Slower, float] = {}
    if one.value:
        rates["targets"] = len(targets) * one.value
    if other.value:
        rates["drafters"] = len(drafters) * other.value
    is_known = len(rates) == 2
    # Of what is kept, the targets have nothing to do behind the first epoch.
    captured = min(1.0, samples.tokens / tokens) if recipe.train.tee else 1.0
    work: dict[Slower, float] = {side: tokens / rate for side, rate in rates.items()}
    if "targets" in work:
        work["targets"] *= captured
    slowest = max(work, key=lambda side: work[side], default=None)
    at_least = None if slowest is None else work[slowest]
    if is_known:
        at_least = tokens * training_time(rates["targets"], rates["drafters"], captured)
    best = None
    if one.value and other.value and not set(targets) & set(drafters):
        count = split_devices(one.value, other.value, len(targets) + len(drafters), captured)
        reached = 1 / training_time(count[0] * one.value, count[1] * other.value, captured)
        best = Split(targets=count[0], drafters=count[1], tokens_per_s=reached)
    return OnlinePlan(
        targets=targets,
        drafters=drafters,
        samples=samples,
        tokens=tokens,
        queue_bytes=recipe.train.queue_bytes,
        is_kept=recipe.train.tee,
        target_tokens_per_s=one,
        drafter_tokens_per_s=other,
        slower=slowest if is_known and slowest is not None else "unknown",
        seconds=at_least if is_known else None,
        at_least=at_least,
        best=best,
    )


def _target_rate(recipe: Recipe, run_dir: RunDir, extraction: Rate) -> Rate:
    measured = _measured(run_dir, TARGET_RATE)
    if measured is not None and extraction.source != "given":
        return measured
    if extraction.value is None:
        return extraction
    workers = len(recipe.target.devices) or recipe.target.workers
    each = f", of {workers} together" if workers > 1 else ""
    return Rate(
        value=extraction.value / workers,
        source=extraction.source,
        said=f"that of the extraction{each}: {extraction.said}",
    )


def _drafter_rate(given: float | None, run_dir: RunDir) -> Rate:
    if given is not None:
        return Rate(value=given, source="given", said="given")
    measured = _measured(run_dir, DRAFTER_RATE)
    if measured is not None:
        return measured
    said = "nothing is measured here yet. Give --drafter-tokens-per-s"
    return Rate(value=None, source="unknown", said=said)


def _measured(run_dir: RunDir, name: str) -> Rate | None:
    """What the last online training in this run directory measured."""
    try:
        for event in last_events(run_dir.events / "train.jsonl"):
            report = event.get("report")
            found = (report if isinstance(report, dict) else event).get(name)
            if isinstance(found, (int, float)) and found > 0:
                said = f"measured in {run_dir.root}"
                return Rate(value=float(found), source="measured", said=said)
    except OSError:
        pass
    return None


def online_rows(plan: OnlinePlan | None) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the plan's table."""
    if plan is None:
        return
    for name, devices, rate in (
        ("target", plan.targets, plan.target_tokens_per_s.value),
        ("drafter", plan.drafters, plan.drafter_tokens_per_s.value),
    ):
        each = "unknown" if rate is None else f"{len(devices)} x {rate:,.0f} tokens/s"
        yield (f"{name}s" if len(devices) > 1 else name, each, "", "")
    took = "unknown" if plan.seconds is None else duration(plan.seconds)
    yield ("time to train online", took, "", "")


def online_lines(plan: OnlinePlan | None) -> Iterator[str]:
    """Sentences of the plan."""
    if plan is None:
        return
    how = "in each epoch, and never stored"
    if plan.is_kept:
        how = "in the first epoch, and kept for the others (train.tee)"
    yield (
        f"online: {counted(plan.samples.count, 'training sample')} with "
        f"{number(plan.samples.tokens)} tokens are captured while training, {how}; "
        f"{short_bytes(plan.queue_bytes)} of hidden states may wait for the drafters "
        "(train.queue_bytes). The store has the validation samples alone."
    )
    for side, rate in (
        ("target", plan.target_tokens_per_s),
        ("drafter", plan.drafter_tokens_per_s),
    ):
        if rate.value is None:
            yield f"unknown: the speed of a {side}: {rate.said.rstrip('.')}."
        else:
            yield f"{side}: {rate.value:,.0f} tokens/s each; {rate.said}."
    if plan.seconds is not None:
        count = len(plan.targets if plan.slower == "targets" else plan.drafters)
        slower = f"{plan.slower} are" if count > 1 else f"{plan.slower.removesuffix('s')} is"
        yield (
            f"online: the {slower} the slower side: {number(plan.tokens)} tokens in "
            f"{duration(plan.seconds)}."
        )
    elif plan.at_least is not None:
        yield f"online: at least {duration(plan.at_least)}, by the speed that is known."
    if plan.best is not None:
        yield f"online: {_proposal(plan, plan.best)}."


def _proposal(plan: OnlinePlan, best: Split) -> str:
    split = f"{counted(best.targets, 'target')} and {counted(best.drafters, 'drafter')}"
    total = len(plan.targets) + len(plan.drafters)
    if best.targets == len(plan.targets):
        return f"{split} is the fastest split of {total} devices alike"
    return (
        f"{split} would be the fastest split of {total} devices alike, "
        f"{best.tokens_per_s:,.0f} tokens/s (train.target_devices, train.drafter_devices)"
    )
