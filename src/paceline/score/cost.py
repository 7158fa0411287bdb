"""What decoding costs: seconds by phase, and how much faster a method is than plain decoding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.score.aggregate import ratio
from paceline.score.results import PLAIN, MethodResult, PromptResult, at_temperature


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What decoding costs, in CPU time of one process, beside plain decoding in the same loop."""

    verify: float
    """One verification over one plain step."""
    draft: float
    """Drafting and tree building of a round over one plain step."""
    overhead: float
    """Walking and compacting the cache, over one plain step."""
    speedup_cpu: float
    """Measured: plain CPU seconds per token over the method's."""
    speedup_wall: float
    """Measured: the same in wall time."""
    projected: dict[str, float]
    """Speed-up if a verification cost this many plain steps, the drafting as measured."""
    projected_free_draft: dict[str, float]
    """The same if drafting cost nothing."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one way of decoding, over all prompts."""

    rounds: int
    """Verifications; of plain decoding its single steps."""
    tokens: int
    """Committed in them."""
    cpu_seconds: dict[str, float]
    """By phase: prefill, draft, tree, verify, commit."""
    phase_seconds: dict[str, float]
    """The same in wall time, the device waited for; empty where that was not measured."""
    wall_seconds: float
    """Without the prefill."""


def cost(results: Sequence[PromptResult], method: str) -> Cost | None:
    """Measured and projected speed-up of a method; None where it was not decoded everywhere."""
    measured = _with(results, method)
    decoded = [r.methods[method] for r in measured]
    if any(m.cpu_seconds is None for m in decoded) or not any(m.rounds for m in decoded):
        return None
    steps = sum(r.plain_steps for r in measured)
    rounds = sum(len(m.rounds) for m in decoded)
    tokens = sum(sum(m.rounds) for m in decoded)
    plain = _step_seconds(_by_phase(r.plain_cpu_seconds for r in measured)) / max(steps, 1)
    if plain <= 0.0:
        return None
    cpu = _by_phase(m.cpu_seconds for m in decoded)
    verify = cpu.get("verify", 0.0) / rounds / plain
    draft = (cpu.get("draft", 0.0) + cpu.get("tree", 0.0)) / rounds / plain
    overhead = cpu.get("commit", 0.0) / rounds / plain
    tau = tokens / rounds
    wall = sum(m.wall_seconds or 0.0 for m in decoded) / tokens
    plain_wall = sum(r.plain_wall_seconds for r in measured) / max(steps, 1)
    costs = (1.0, 1.1, 1.25, 1.5, 2.0)
    return Cost(
        verify=verify,
        draft=draft,
        overhead=overhead,
        speedup_cpu=tau / (verify + draft + overhead),
        speedup_wall=ratio(plain_wall, wall),
        projected={f"{c:g}": tau / (c + draft + overhead) for c in costs},
        projected_free_draft={f"{c:g}": tau / c for c in costs},
    )


def timing(results: Sequence[PromptResult], method: str) -> Timing | None:
    """Seconds of a method; None where it was not decoded everywhere."""
    decoded: list[MethodResult] = [r.methods[method] for r in _with(results, method)]
    if not decoded or any(m.cpu_seconds is None for m in decoded):
        return None
    return Timing(
        rounds=sum(len(m.rounds) for m in decoded),
        tokens=sum(sum(m.rounds) for m in decoded),
        cpu_seconds=_by_phase(m.cpu_seconds for m in decoded),
        phase_seconds=_measured([m.phase_seconds for m in decoded]),
        wall_seconds=sum(m.wall_seconds or 0.0 for m in decoded),
    )


def plain_timings(results: Sequence[PromptResult]) -> dict[str, Timing]:
    """Seconds of plain decoding, by its name at each temperature."""
    found: dict[str, list[PromptResult]] = {}
    for result in results:
        found.setdefault(at_temperature(PLAIN, result.temperature), []).append(result)
    return {
        name: Timing(
            rounds=sum(r.plain_steps for r in of),
            tokens=sum(r.plain_steps for r in of),
            cpu_seconds=_by_phase(r.plain_cpu_seconds for r in of),
            phase_seconds=_measured([r.plain_phase_seconds for r in of]),
            wall_seconds=sum(r.plain_wall_seconds for r in of),
        )
        for name, of in found.items()
    }


def plain_rates(timing: Timing) -> dict[str, Any]:
    """Plain decoding as the result tells it for one temperature."""
    return {
        "tokens": timing.tokens,
        "cpu_seconds_per_token": ratio(_step_seconds(timing.cpu_seconds), timing.tokens),
        "wall_seconds_per_token": ratio(timing.wall_seconds, timing.tokens),
        "prefill_cpu_seconds": timing.cpu_seconds.get("prefill", 0.0),
    }


def _step_seconds(cpu: dict[str, float]) -> float:
    """Of plain steps: the target's passes and the choice of tokens, which a round has as well."""
    return cpu.get("verify", 0.0) + cpu.get("commit", 0.0)


def _with(results: Iterable[PromptResult], method: str) -> list[PromptResult]:
    return [r for r in results if method in r.methods]


def _measured(each: Sequence[dict[str, float] | None]) -> dict[str, float]:
    """Empty unless all of them were: a sum over some would look like that of all."""
    return {} if any(one is None for one in each) else _by_phase(each)


def _by_phase(each: Iterable[dict[str, float] | None]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in each:
        for phase, seconds in (one or {}).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total
