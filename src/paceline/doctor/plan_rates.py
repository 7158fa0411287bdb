"""How fast, what holds it up, and when it ends: the flow of device, staging and upload."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.doctor.plan_bytes import StoreSizes
from paceline.doctor.plan_machine import Gpu
from paceline.doctor.plan_space import Staging
from paceline.doctor.plan_target import TargetSizes
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.watch.tail import counts_of, last_events

SHARE_OF_PEAK = 0.4
"""Of the published peak, that a forward pass over long batches reaches: a guess."""

_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 990e12),
    ("H200", 990e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 990e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 150e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX 5090", 210e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("A6000", 155e12),
)
"""Published dense bfloat16 FLOP/s, by a part of the device's name; the first that it has."""

Bottleneck = Literal["device", "staging", "upload", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A speed, and where it comes from."""

    value: float | None
    """None where it is not known."""
    source: Literal["given", "measured", "guess", "unknown"]
    said: str
    """The same in words."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The extraction in time."""

    tokens_per_s: Rate
    """Of all devices together."""
    upload: Rate | None
    """Bytes per second to the store; None where nothing is uploaded."""
    made: float | None
    """Bytes per second that the devices make, after the codec."""
    bottleneck: Bottleneck
    seconds: float | None
    """To the end of the extraction, for what is not verified yet."""
    at_least: float | None
    """The same where only one of the speeds is known."""
    ends_at: float | None
    """Seconds since the epoch, were it to begin now."""
    staging_fills_after: float | None
    """Seconds until the staging is full; None where it never is, or that is not known."""
    staging_lasts: float | None
    """Seconds that the work goes on while the store does not answer."""


def device_rate(
    given: float | None,
    recipe: Recipe,
    run_dir: RunDir,
    target: TargetSizes,
    *,
    deepest: int,
    gpus: dict[str, Gpu],
) -> Rate:
    """Tokens per second of the extraction: as given, as measured by an earlier one, or guessed.

    `deepest` is the last layer that has to run.
    """
    if given is not None:
        return Rate(value=given, source="given", said="given")
    measured = _measured(run_dir.events / "extract.jsonl")
    if measured is not None:
        return Rate(value=measured, source="measured", said=f"measured in {run_dir.root}")
    return _guessed(recipe, target, deepest, gpus)


def _measured(path: Path) -> float | None:
    try:
        for event in last_events(path):
            counts = counts_of(event)
            if counts is not None and counts.rate:
                return counts.rate
    except OSError:
        return None
    return None


def _guessed(recipe: Recipe, target: TargetSizes, deepest: int, gpus: dict[str, Gpu]) -> Rate:
    def unknown(why: str) -> Rate:
        return Rate(value=None, source="unknown", said=f"{why}. Give --tokens-per-s.")

    names = device_names(recipe)
    if names == ("cpu",):
        return unknown("nobody publishes what a CPU reaches")
    found = [gpus[name] for name in names if name in gpus]
    if len(found) < len(names):
        return unknown(f"{', '.join(n for n in names if n not in gpus)} is not visible here")
    if recipe.target.dtype == "float32":
        return unknown("target.dtype float32 does not run at the published peak")
    if not target.layer_weights:
        return unknown(target.unknown)
    peaks = [next((peak for part, peak in _PEAKS if part in gpu.name), None) for gpu in found]
    if None in peaks:
        return unknown(f"no peak is known of {found[peaks.index(None)].name}")
    total = sum(peak for peak in peaks if peak is not None)
    per_token = 2 * sum(target.layer_weights[: deepest + 1])
    said = (
        f"a guess: {SHARE_OF_PEAK:.0%} of the published {total / 1e12:,.0f} TFLOP/s of "
        f"{found[0].name}{f' x {len(found)}' if len(found) > 1 else ''}, "
        f"{per_token / 1e9:,.1f} GFLOP a token"
    )
    return Rate(value=SHARE_OF_PEAK * total / per_token, source="guess", said=said)


def device_names(recipe: Recipe) -> tuple[str, ...]:
    """The devices of an extraction."""
    numbers = recipe.target.devices
    return tuple(f"cuda:{number}" for number in numbers) or (recipe.target.device,)


def flow(
    tokens_per_s: Rate,
    upload: Rate | None,
    *,
    recipe: Recipe,
    tokens: int,
    done: int = 0,
    store: StoreSizes,
    staging: Staging | None,
    now: float,
) -> Flow:
    """Put the rates together, for the `tokens` in all of which `done` are verified.

    The devices make D bytes a second and the uploads take U. Of n shards that fit into the
    staging each is there while one of w workers makes it, w/D seconds a byte, and while it is
    uploaded, 1/U at the least: no more than n / (w/D + 1/U) bytes a second pass through.
    """
    made = None
    if tokens_per_s.value is not None:
        made = tokens_per_s.value * store.total / tokens
    limits: dict[Bottleneck, float] = {} if made is None else {"device": made}
    fills = lasts = None
    speed = None if staging is None or upload is None else upload.value
    if speed is not None:
        limits["upload"] = speed
    if staging is not None and made is not None:
        lasts = staging.limit / made
        if speed is not None:
            fills = staging.limit / (made - speed) if made > speed else None
            limits["staging"] = _through(recipe, staging, made, speed)
    is_known = made is not None and (staging is None or speed is not None)
    slowest = min(limits, key=lambda name: limits[name], default=None)
    left = store.total * max(0, tokens - done) / tokens
    at_least = left / limits[slowest] if slowest is not None else None
    seconds = at_least if is_known else None
    if staging is not None and staging.limit < staging.smallest:
        slowest, is_known, seconds, fills, lasts = "staging", True, None, None, None
    return Flow(
        tokens_per_s=tokens_per_s,
        upload=upload if staging is not None else None,
        made=made,
        bottleneck=slowest if is_known and slowest is not None else "unknown",
        seconds=seconds,
        at_least=at_least,
        ends_at=None if seconds is None else now + seconds,
        staging_fills_after=fills,
        staging_lasts=lasts,
    )


def _through(recipe: Recipe, staging: Staging, made: float, speed: float) -> float:
    workers = len(recipe.target.devices) or recipe.target.workers
    shards = max(1, staging.limit // staging.smallest)
    return shards / (workers / made + 1 / speed)
