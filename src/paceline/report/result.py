"""`score/result.json` as the report reads it; a number that is not finite stands there as null."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import IntegrityError
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.stage import Record

Number = float | None


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One method over a set of prompts."""

    how: str
    prompts: int
    rounds: int
    tokens: int
    tau: Number
    tau_interval: tuple[Number, Number]
    tau_prompt_mean: Number
    by_depth: tuple[Number, ...]
    """Share of rounds that committed more than k tokens, k = 1, 2, ...; τ = 1 + their sum."""

    @property
    def has_interval(self) -> bool:
        """Whether the interval says anything: resampling a single prompt gives no width."""
        low, high = self.tau_interval
        return low is not None and high is not None and low < high


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one method costs, in plain steps, and how much faster it is."""

    verify: Number
    draft: Number
    overhead: Number
    speedup_cpu: Number
    speedup_wall: Number
    projected: dict[str, Number]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Plain decoding in the same loop."""

    tokens: int
    cpu_seconds_per_token: Number
    wall_seconds_per_token: Number


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """Whether speculative output was the target's own."""

    checked: int
    identical: int
    near_ties: int
    violations: tuple[str, ...]
    walk_checked: int
    walk_equal: int


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of decoding one prompt."""

    rounds: tuple[int, ...]
    how: str
    identical: bool | None = None
    walk_rounds: tuple[int, ...] | None = None

    @property
    def tau(self) -> float | None:
        """Mean tokens per round; None without a round."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else None


@dataclass(frozen=True, kw_only=True)
class PromptScore:
    """All ways of decoding one prompt."""

    prompt_id: str
    dataset: str
    prompt_tokens: int
    answer_ids: tuple[int, ...]
    """What plain decoding wrote."""
    finish: str
    methods: dict[str, Method]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a score measured."""

    pooled: dict[str, Acceptance]
    """By method: `chain` and `ddtree-M`."""
    datasets: dict[str, dict[str, Acceptance]]
    plain: Plain
    cost: dict[str, Cost]
    lossless: Lossless
    provenance: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[PromptScore, ...] = ()

    @property
    def best_tree(self) -> str | None:
        """The method with the highest pooled τ that is no chain."""
        trees = {n: a.tau or 0.0 for n, a in self.pooled.items() if n != "chain"}
        return max(trees, key=lambda name: trees[name], default=None)


def read_result(folder: Path, record: Record | None) -> Result | None:
    """The result in the score's folder; None where there is none.

    Raises IntegrityError where it is not as it was written, or no result at all.
    """
    path = folder / "result.json"
    if not path.is_file():
        return None
    expected = (record.outputs or {}).get(path.name) if record else None
    if expected is not None and digest_file(path) != expected:
        raise _damaged(path, "its checksum does not hold")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{path}: not the result that was written ({reason}). Run `paceline score` again: the "
        "prompts that are done stand in its journal, and the result is made anew from them."
    )
