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
    rate: Number = None
    """Accepted drafted tokens over the depth that drafts have."""

    @property
    def has_interval(self) -> bool:
        """Whether the interval says anything: resampling a single prompt gives no width."""
        low, high = self.tau_interval
        return low is not None and high is not None and low < high


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One method over a part of the rounds."""

    prompts: int
    rounds: int
    tau: Number
    tau_interval: tuple[Number, Number]

    @property
    def has_interval(self) -> bool:
        """As that of an acceptance."""
        low, high = self.tau_interval
        return low is not None and high is not None and low < high


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one way of decoding, over all prompts."""

    rounds: int
    cpu_seconds: dict[str, Number]
    phase_seconds: dict[str, Number]
    wall_seconds: Number


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
    turn: int = 0
    text: str | None = None
    """What was asked, of prompts that are not in the corpus."""


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
    """The answers: of each turn of each prompt."""
    lengths: dict[str, dict[str, Slice]] = field(default_factory=dict)
    """By the length of prompt and answer, then by method; so are the next two."""
    languages: dict[str, dict[str, Slice]] = field(default_factory=dict)
    domains: dict[str, dict[str, Slice]] = field(default_factory=dict)
    overlap: dict[str, dict[str, Number]] = field(default_factory=dict)
    """By data set; what `OverlapCount.numbers` has."""
    timings: dict[str, Timing] = field(default_factory=dict)

    @property
    def num_prompts(self) -> int:
        """Prompts, each of one turn or several."""
        return len({prompt.prompt_id for prompt in self.prompts})

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
        return msgspec.convert(_with_plain(msgspec.json.decode(path.read_bytes())), Result)
    except (msgspec.MsgspecError, UnicodeError, LookupError, TypeError) as error:
        raise _damaged(path, str(error)) from error


def _with_plain(value: Any) -> Any:
    """Plain decoding where the first version had it; the second has one for each temperature."""
    if isinstance(value, dict) and "plain" not in value and value.get("settings"):
        return {**value, "plain": value["settings"][0]["plain"]}
    return value


def _damaged(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{path}: not the result that was written ({reason}). Run `paceline score` again: the "
        "prompts that are done stand in its journal, and the result is made anew from them."
    )
