"""From rounds to numbers: τ in both averages, acceptance by depth, losslessness."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.score.bootstrap import tau_interval
from paceline.score.results import PromptResult

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Logit gaps below which differently shaped products may choose either token."""


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
    """Mean over prompts of each prompt's own τ, over the rounds of all its turns."""
    rate: float
    """Accepted drafted tokens over the depth that drafts have, in all rounds."""
    by_depth: tuple[float, ...]
    """Share of rounds that committed more than k tokens, k = 1, 2, ...; τ = 1 + their sum."""
    conditional: tuple[float, ...]
    """Of the rounds that were accepted up to depth k - 1, those accepted at k too, as far as any
    round got."""


@dataclass(frozen=True, kw_only=True)
class Losslessness:
    """Whether speculative output was the target's own."""

    checked: int
    """Decoded answers compared, over prompts, turns and methods."""
    identical: int
    near_ties: int
    """Answers that differ first where the target's two best logits nearly agree."""
    violations: tuple[str, ...]
    """`prompt/method@token` of differences that a near tie does not explain."""
    walk_checked: int
    """Decoded answers whose rounds were compared with the walk's."""
    walk_equal: int


def acceptance(
    results: Sequence[PromptResult], method: str, *, depths: int, seed: int
) -> Acceptance:
    """Pool one method over prompts. Prompts without a round (an answer of one token) add none.

    `depths` is how many tokens deep a draft is, which is a block less its anchor.
    """
    measured = [r for r in results if method in r.methods]
    by_prompt = rounds_by_prompt(measured, method)
    per_prompt = [rounds for rounds in by_prompt.values() if rounds]
    tokens = [sum(rounds) for rounds in per_prompt]
    counts = [len(rounds) for rounds in per_prompt]
    own = [t / n for t, n in zip(tokens, counts, strict=True)]
    all_rounds = np.array([n for rounds in per_prompt for n in rounds], dtype=np.int64)
    deepest = int(all_rounds.max()) if all_rounds.size else 1
    reached = [int((all_rounds > k).sum()) for k in range(max(depths, deepest - 1) + 1)]
    hows = {r.methods[method].how for r in measured}
    return Acceptance(
        how="decoded" if hows == {"decoded"} else "walk",
        prompts=len(by_prompt),
        rounds=sum(counts),
        tokens=sum(tokens),
        tau=ratio(sum(tokens), sum(counts)),
        tau_interval=tau_interval(tokens, counts, seed=seed),
        tau_prompt_mean=ratio(sum(own), len(own)),
        rate=ratio(sum(tokens) - sum(counts), sum(counts) * depths),
        by_depth=tuple(float((all_rounds > k).mean()) for k in range(1, deepest)),
        conditional=tuple(now / before for before, now in pairwise(reached) if before),
    )


def rounds_by_prompt(results: Iterable[PromptResult], method: str) -> Mapping[str, list[int]]:
    """The rounds of each prompt, those of all its turns together."""
    found: dict[str, list[int]] = {}
    for result in results:
        if method in result.methods:
            found.setdefault(result.prompt_id, []).extend(result.methods[method].rounds)
    return found


def losslessness(results: Iterable[PromptResult], dtype: str) -> Losslessness:
    """Judge every decoded answer against the plain one, and the walk against every decoding."""
    checked = identical = near_ties = walk_checked = walk_equal = 0
    violations = []
    for result in results:
        for name, method in result.methods.items():
            if method.how != "decoded" or method.identical is None:
                continue
            checked += 1
            if method.identical:
                identical += 1
                walk_checked += method.walk_rounds is not None
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


def ratio(above: float, below: float) -> float:
    """0 where there is nothing below."""
    return float(above / below) if below else 0.0
