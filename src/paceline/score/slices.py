"""τ of parts of the rounds: by context length, language and domain; and prompt by prompt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.score.aggregate import ratio, rounds_by_prompt
from paceline.score.bootstrap import tau_interval
from paceline.score.results import PromptResult

_LENGTHS = ((512, "below 512"), (2048, "512 to 2k"), (8192, "2k to 8k"), (32768, "8k to 32k"))
_LONGER = "32k and more"

LENGTHS = (*(name for _, name in _LENGTHS), _LONGER)
"""Names of the lengths, shortest first."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One method over a part of the rounds."""

    prompts: int
    """With a round in it."""
    rounds: int
    tokens: int
    tau: float
    tau_interval: tuple[float, float]


Slices = dict[str, dict[str, Slice]]
"""By the part's name, then by method."""

_Part = tuple[str, str, Sequence[int]]
"""Name of the part, prompt, rounds."""


def length_name(tokens: int) -> str:
    """Which length a context of so many tokens has; `2k` is 2048."""
    return next((name for most, name in _LENGTHS if tokens < most), _LONGER)


def by_length(results: Sequence[PromptResult], methods: Sequence[str], *, seed: int) -> Slices:
    """Rounds by the length of prompt and answer at their begin, shortest first."""

    def parts(result: PromptResult, method: str) -> Iterator[_Part]:
        # The first token of the answer comes with the prompt's own pass.
        position = result.prompt_tokens + 1
        for committed in result.methods[method].rounds:
            yield length_name(position), result.prompt_id, (committed,)
            position += committed

    found = _slices(results, methods, parts, seed)
    return {name: found[name] for name in LENGTHS if name in found}


def by_label(
    results: Sequence[PromptResult],
    methods: Sequence[str],
    label: Callable[[PromptResult], str],
    *,
    seed: int,
) -> Slices:
    """Rounds by what `label` says of their prompt, such as its language; the most prompts first."""

    def parts(result: PromptResult, method: str) -> Iterator[_Part]:
        if result.methods[method].rounds:
            yield label(result), result.prompt_id, result.methods[method].rounds

    found = _slices(results, methods, parts, seed)
    prompts = {name: max(s.prompts for s in of.values()) for name, of in found.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: (-prompts[name], name))}


def prompt_table(results: Sequence[PromptResult], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Each prompt's own τ by method, null where it had no round, in the order of the results."""
    firsts: dict[str, PromptResult] = {}
    for result in results:
        firsts.setdefault(result.prompt_id, result)
    rounds = {method: rounds_by_prompt(results, method) for method in methods}
    return [
        {
            "prompt_id": prompt_id,
            "dataset": first.dataset,
            "domain": first.domain,
            "language": first.language,
            "tau": {
                method: ratio(sum(of[prompt_id]), len(of[prompt_id])) or None
                for method, of in rounds.items()
                if prompt_id in of
            },
        }
        for prompt_id, first in firsts.items()
    ]


def plain_slices(slices: Slices) -> dict[str, Any]:
    """For JSON."""
    return {
        name: {method: asdict(one) for method, one in of.items()} for name, of in slices.items()
    }


def _slices(
    results: Sequence[PromptResult],
    methods: Sequence[str],
    parts: Callable[[PromptResult, str], Iterable[_Part]],
    seed: int,
) -> Slices:
    sums: dict[str, dict[str, dict[str, list[int]]]] = {}
    for method in methods:
        for result in results:
            if method not in result.methods:
                continue
            for name, prompt_id, rounds in parts(result, method):
                of = sums.setdefault(name, {}).setdefault(method, {})
                pair = of.setdefault(prompt_id, [0, 0])
                pair[0] += sum(rounds)
                pair[1] += len(rounds)
    return {
        name: {method: _slice(list(of.values()), seed) for method, of in methods_of.items()}
        for name, methods_of in sums.items()
    }


def _slice(pairs: Sequence[Sequence[int]], seed: int) -> Slice:
    tokens, rounds = [t for t, _ in pairs], [n for _, n in pairs]
    return Slice(
        prompts=len(pairs),
        rounds=sum(rounds),
        tokens=sum(tokens),
        tau=ratio(sum(tokens), sum(rounds)),
        tau_interval=tau_interval(tokens, rounds, seed=seed),
    )
