"""The budget that decodes fastest: τ by budget against what a round of each costs.

docs/algorithms.md, "Choosing a budget".
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.decode.session import open_session
from paceline.target.load import Target
from paceline.types.tree import DraftTree


@dataclass(frozen=True)
class CostCurve:
    """Seconds by a size, measured at some sizes and linear in between."""

    sizes: tuple[int, ...]
    """Rising."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("CostCurve: one time for each size, and at least one size")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"CostCurve: sizes must rise, not {list(self.sizes)}")
        if any(not 0 <= value < float("inf") for value in self.seconds):
            raise ValueError(f"CostCurve: times must be 0 or more, not {list(self.seconds)}")

    def at(self, size: int) -> float:
        """Seconds at a size. Raises ValueError outside of what was measured."""
        if not self.sizes[0] <= size <= self.sizes[-1]:
            raise ValueError(
                f"no time for {size}: measured were {self.sizes[0]} to {self.sizes[-1]}"
            )
        above = bisect_left(self.sizes, size)
        if self.sizes[above] == size:
            return self.seconds[above]
        low, high = self.sizes[above - 1], self.sizes[above]
        part = (size - low) / (high - low)
        return (1 - part) * self.seconds[above - 1] + part * self.seconds[above]


@dataclass(frozen=True)
class RoundCosts:
    """What the parts of a round cost, all on the same clock."""

    draft: float
    """Seconds of one draft, whatever is made of it."""
    verify: CostCurve
    """By rows: from 1, a plain step, to the largest budget and the root."""
    tree: CostCurve | None = None
    """By budget: best columns, building and committing; None where that is not worth counting."""


@dataclass(frozen=True)
class MethodRate:
    """One method's line of the comparison."""

    budget: int | None
    """None for the chain."""
    tau: float
    seconds: float
    """Of a round."""
    speedup: float
    """Over plain decoding, which commits one token for each verification of one row."""

    @property
    def name(self) -> str:
        """`chain`, or `ddtree-M`."""
        return "chain" if self.budget is None else f"ddtree-{self.budget}"


@dataclass(frozen=True)
class BudgetChoice:
    """What decodes fastest, and why."""

    budget: int | None
    """None where the chain wins."""
    table: tuple[MethodRate, ...]
    """The chain, then budgets as they rise."""
    sentence: str
    """For a person."""


def choose_budget(
    tau: Mapping[int | None, float], costs: RoundCosts, *, drafted: int
) -> BudgetChoice:
    """The budget M of highest τ(M) / (draft + tree(M) + verify(M + 1)), or the chain.

    Of equal ones the smaller budget, and the chain before any. All figures should come from
    validation prompts: a choice made on the prompts that are scored flatters the score.

    Args:
        tau: τ by budget, None for the chain's, as the walk gives them.
        costs: measured; `verify` must reach the largest budget and the root.
        drafted: tokens that a chain drafts.

    Raises ValueError where the chain's τ or a cost is missing.

    """
    if None not in tau:
        raise ValueError("choosing a budget needs the chain's tau to compare with")
    plain = costs.verify.at(1)
    table = []
    for budget in (None, *sorted(b for b in tau if b is not None)):
        rows = drafted + 1 if budget is None else budget + 1
        seconds = costs.draft + costs.verify.at(rows)
        if budget is not None and costs.tree is not None:
            seconds += costs.tree.at(budget)
        if seconds <= 0:
            raise ValueError(f"a round of {rows} rows that takes no time cannot be compared")
        table.append(MethodRate(budget, tau[budget], seconds, tau[budget] * plain / seconds))
    best = max(table, key=lambda rate: rate.tau / rate.seconds)
    return BudgetChoice(best.budget, tuple(table), _sentence(best, table))


def _sentence(best: MethodRate, table: Sequence[MethodRate]) -> str:
    chain, *trees = table
    if not trees:
        said = "the chain: no budget was compared with it"
    elif best is chain:
        rival = max(trees, key=lambda rate: rate.speedup)
        said = f"the chain wins: {rival.name}, the best tree, {_beside(rival, chain)}"
    else:
        said = f"{best.name} wins: it {_beside(best, chain)}"
        if len(trees) > 1 and best is trees[-1]:
            said += "; it is the largest budget that was compared, and a larger one may be better"
    if best.speedup < 1:
        said += f". Plain decoding is faster still: {best.name} reaches {best.speedup:.2f}x of it"
    return said


def _beside(tree: MethodRate, chain: MethodRate) -> str:
    return (
        f"decodes {tree.speedup / chain.speedup:.2f} times as fast as the chain, with a tau of "
        f"{tree.tau:.2f} for {chain.tau:.2f} and rounds that cost "
        f"{tree.seconds / chain.seconds:.2f} times as much"
    )


Clock = Callable[[], float]


def measure_costs(
    work: Callable[[int], object],
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    clock: Clock = time.perf_counter,
    synchronize: Callable[[], object] = lambda: None,
) -> CostCurve:
    """The time of `work(size)` for each size: the shortest of `repeats`, after one that warms up.

    Sizes take turns, so that a slow minute of the machine hits all of them. `synchronize` waits for
    a device, before and after, and is within the time.
    """
    if repeats < 1:
        raise ValueError(f"measuring needs 1 repeat or more, not {repeats}")
    ordered = sorted(set(sizes))
    shortest = dict.fromkeys(ordered, float("inf"))
    for turn in range(repeats + 1):
        for size in ordered:
            synchronize()
            start = clock()
            work(size)
            synchronize()
            if turn:
                shortest[size] = min(shortest[size], clock() - start)
    return CostCurve(tuple(ordered), tuple(shortest.values()))


def verify_costs(
    target: Target,
    prompt: Sequence[int],
    rows: Sequence[int],
    *,
    taps: tuple[int, ...],
    repeats: int = 5,
    clock: Clock | None = None,
) -> CostCurve:
    """Seconds of one verification by its rows, behind the cached `prompt`.

    Of a target with recurrent layers a commit costs as much again as what it accepts, which is not
    in here.

    Args:
        target: as it decodes; its device is waited for.
        prompt: of the length at which costs are asked for.
        rows: with 1, a plain step, among them; a budget M has M + 1.
        taps: captured layers, as the drafter asks for them.
        repeats: of each.
        clock: `time.process_time` for CPU time, on a CPU alone; wall time without.

    """
    session = open_session(target, taps)
    session.prefill([prompt])
    device = target.model.device
    on_host = device.type == "cpu"
    if clock is time.process_time and not on_host:
        raise ValueError(f"CPU time says nothing about a target on {device}: use wall time")

    def verify(size: int) -> None:
        # A chain: what a verification costs depends on its rows, not on who sees whom.
        session.verify([DraftTree.chain(prompt[-1], (prompt[-1],) * (size - 1))])

    return measure_costs(
        verify,
        rows,
        repeats=repeats,
        clock=clock or time.perf_counter,
        synchronize=(lambda: None) if on_host else (lambda: torch.accelerator.synchronize(device)),
    )
