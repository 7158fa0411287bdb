"""From rounds to numbers: τ in both averages, acceptance by depth, cost, losslessness."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.score.prompt import MethodResult, PromptResult

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Logit gaps below which differently shaped products may choose either token."""

_BOOTSTRAP = 1000


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How much one method has accepted over a set of prompts."""

    how: str
    prompts: int
    rounds: int
    tokens: int
    tau: float
    """Pooled: all tokens over all rounds, the target's own token included."""
    tau_interval: tuple[float, float]
    """95 % bootstrap interval of the pooled τ over prompts."""
    tau_prompt_mean: float
    """Mean over prompts of each prompt's own τ."""
    by_depth: tuple[float, ...]
    """Share of rounds that committed more than k tokens, k = 1, 2, ...; τ = 1 + their sum."""


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
class Losslessness:
    """Whether speculative output was the target's own."""

    checked: int
    """Decoded answers compared, over prompts and methods."""
    identical: int
    near_ties: int
    """Answers that differ first where the target's two best logits nearly agree."""
    violations: tuple[str, ...]
    """`prompt/method@token` of differences that a near tie does not explain."""
    walk_checked: int
    """Decoded answers whose rounds were compared with the walk's."""
    walk_equal: int


def acceptance(results: Sequence[PromptResult], method: str, *, seed: int) -> Acceptance:
    """Pool one method over prompts. Prompts without a round (an answer of one token) add none."""
    per_prompt = [r.methods[method].rounds for r in results if r.methods[method].rounds]
    tokens = np.array([sum(rounds) for rounds in per_prompt], dtype=np.float64)
    counts = np.array([len(rounds) for rounds in per_prompt], dtype=np.float64)
    all_rounds = np.array([n for rounds in per_prompt for n in rounds], dtype=np.int64)
    hows = {r.methods[method].how for r in results}
    deepest = int(all_rounds.max()) if all_rounds.size else 1
    return Acceptance(
        how="decoded" if hows == {"decoded"} else "walk",
        prompts=len(results),
        rounds=int(counts.sum()),
        tokens=int(tokens.sum()),
        tau=_ratio(tokens.sum(), counts.sum()),
        tau_interval=_interval(tokens, counts, seed),
        tau_prompt_mean=float((tokens / counts).mean()) if counts.size else 0.0,
        by_depth=tuple(float((all_rounds > k).mean()) for k in range(1, deepest)),
    )


def cost(results: Sequence[PromptResult], method: str) -> Cost | None:
    """Measured and projected speed-up of a method; None where it was not decoded everywhere."""
    decoded = [r.methods[method] for r in results]
    if any(m.cpu_seconds is None for m in decoded) or not any(m.rounds for m in decoded):
        return None
    steps = sum(r.plain_steps for r in results)
    rounds = sum(len(m.rounds) for m in decoded)
    tokens = sum(sum(m.rounds) for m in decoded)
    plain = sum(r.plain_cpu_seconds.get("verify", 0.0) for r in results) / max(steps, 1)
    if plain <= 0.0:
        return None
    verify = _phase(decoded, "verify") / rounds / plain
    draft = (_phase(decoded, "draft") + _phase(decoded, "tree")) / rounds / plain
    overhead = _phase(decoded, "commit") / rounds / plain
    tau = tokens / rounds
    wall = sum(m.wall_seconds or 0.0 for m in decoded) / tokens
    plain_wall = sum(r.plain_wall_seconds for r in results) / max(steps, 1)
    costs = (1.0, 1.1, 1.25, 1.5, 2.0)
    return Cost(
        verify=verify,
        draft=draft,
        overhead=overhead,
        speedup_cpu=tau / (verify + draft + overhead),
        speedup_wall=_ratio(plain_wall, wall),
        projected={f"{c:g}": tau / (c + draft + overhead) for c in costs},
        projected_free_draft={f"{c:g}": tau / c for c in costs},
    )


def losslessness(results: Iterable[PromptResult], dtype: str) -> Losslessness:
    """Judge every decoded answer against the plain one, and the walk against every decoding."""
    checked = identical = near_ties = walk_checked = walk_equal = 0
    violations = []
    for result in results:
        for name, method in result.methods.items():
            if method.how != "decoded":
                continue
            checked += 1
            if method.identical:
                identical += 1
                walk_checked += 1
                walk_equal += method.walk_rounds == method.rounds
            elif method.margin is not None and method.margin < NEAR_TIE[dtype]:
                near_ties += 1
            else:
                violations.append(f"{result.prompt_id}/{name}@{method.divergence}")
    return Losslessness(
        checked=checked,
        identical=identical,
        near_ties=near_ties,
        violations=tuple(violations),
        walk_checked=walk_checked,
        walk_equal=walk_equal,
    )


def _phase(methods: Iterable[MethodResult], phase: str) -> float:
    return sum((m.cpu_seconds or {}).get(phase, 0.0) for m in methods)


def _interval(tokens: np.ndarray, counts: np.ndarray, seed: int) -> tuple[float, float]:
    if not counts.size:
        return (0.0, 0.0)
    draws = np.random.default_rng(seed).integers(0, counts.size, size=(_BOOTSTRAP, counts.size))
    taus = tokens[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(taus, (0.025, 0.975))
    return (float(low), float(high))


def _ratio(above: float, below: float) -> float:
    return float(above / below) if below else 0.0
