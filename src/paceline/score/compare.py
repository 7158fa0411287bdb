"""Results beside each other: which method yields more, over the prompts that all have scored."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import DataError
from paceline.score.bootstrap import Difference, paired, tau_interval
from paceline.watch.words import counted, ordered

_SEED = 0

_MUST_AGREE = (
    ("target_identity", "another target"),
    ("template", "another chat template"),
    ("template_args", "other template arguments"),
    ("max_new_tokens", "another score.max_new_tokens"),
    ("top_k", "another score.top_k"),
    ("top_p", "another score.top_p"),
    ("min_p", "another score.min_p"),
    ("dtype", "another type of numbers"),
    ("rounds_rule", "another rule of what a round is"),
)
"""Keys of the provenance without which two τ measure different things, and what to call them."""

_SPEED_AGREES = ("device", "device_name", "machine", "processes", "threads_per_process", "torch")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One method of one result, over the common prompts of a data set."""

    result: str
    """Name of the result."""
    method: str
    tau: float
    interval: tuple[float, float]
    speedup: float | None
    """Measured in wall time over all of the result's prompts; None where it was walked, and in a
    table of one data set."""
    to_first: Difference | None
    """Against the same method of the first result; None for that one, and where it lacks it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One data set, or all of them together."""

    dataset: str
    """Empty for all."""
    prompts: int
    """Common to all results, with a round in each method that is compared."""
    rows: tuple[Measured, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `paceline compare` says."""

    results: dict[str, str]
    """Name to path, the first one first."""
    prompts: int
    """Common to all."""
    notes: tuple[str, ...]
    """What is not the same, a sentence each."""
    tables: tuple[Table, ...]
    """All data sets together first, then each; of one data set the first alone."""


class _Method(msgspec.Struct):
    rounds: list[int]


class _Answer(msgspec.Struct):
    prompt_id: str
    dataset: str
    methods: dict[str, _Method]


class _Result(msgspec.Struct):
    """What a comparison needs of a result, of any version."""

    schema_version: int
    provenance: dict[str, Any]
    prompts: list[_Answer]
    cost: dict[str, dict[str, Any]] = {}
    settings: list[dict[str, Any]] = []


_Pairs = Mapping[str, Mapping[str, tuple[int, int]]]
"""By method, then by prompt: tokens and rounds."""


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare results, or the runs that hold them, with the first of them.

    Raises DataError for a path without a result that can be read, and where the results have no
    prompt in common.
    """
    files = [_file_of(path) for path in paths]
    results = dict(zip(_names(paths), map(_read, files), strict=True))
    sums = {name: _sums(result) for name, result in results.items()}
    shared = set.intersection(*({a.prompt_id for a in r.prompts} for r in results.values()))
    if not shared:
        raise DataError(
            f"{' and '.join(map(str, files))}: no prompt in common, so nothing can be compared. "
            "Score the same data sets with the same target's template."
        )
    first = next(iter(results.values()))
    datasets = {a.prompt_id: a.dataset for a in first.prompts if a.prompt_id in shared}
    tables = [_table("", list(datasets), results, sums)]
    each = sorted(set(datasets.values()))
    for dataset in each if len(each) > 1 else ():
        prompts = [p for p, of in datasets.items() if of == dataset]
        tables.append(_table(dataset, prompts, results, sums))
    return Comparison(
        results={name: str(path) for name, path in zip(results, files, strict=True)},
        prompts=len(shared),
        notes=tuple(_notes(results, len(shared))),
        tables=tuple(tables),
    )


def _file_of(path: Path) -> Path:
    return path / "score" / "result.json" if path.is_dir() else path


def _read(path: Path) -> _Result:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Result)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no result here. Give a run directory after its `paceline score`, or a "
            "result.json."
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise DataError(f"{path}: not a result of `paceline score` ({error}).") from error


def _names(paths: Sequence[Path]) -> list[str]:
    """Short ones that differ: the end of each path, as much of it as that takes."""
    shown = [_shown(path) for path in paths]
    for length in range(1, max(len(parts) for parts in shown) + 1):
        names = ["/".join(parts[-length:]) for parts in shown]
        if len({*names}) == len(names):
            return names
    return [f"{number}: {'/'.join(parts[-2:])}" for number, parts in enumerate(shown, start=1)]


def _shown(path: Path) -> tuple[str, ...]:
    whole = path.absolute()
    is_of_run = whole.name == "result.json" and whole.parent.name == "score"
    return (whole.parents[1] if is_of_run else whole).parts


def _sums(result: _Result) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for answer in result.prompts:
        for name, method in answer.methods.items():
            of = found.setdefault(name, {})
            tokens, rounds = of.get(answer.prompt_id, (0, 0))
            of[answer.prompt_id] = (tokens + sum(method.rounds), rounds + len(method.rounds))
    return found


def _table(
    dataset: str,
    prompts: Sequence[str],
    results: Mapping[str, _Result],
    sums: Mapping[str, _Pairs],
) -> Table:
    # A prompt whose answer is one token has no round anywhere.
    used = [p for p in prompts if all(_rounds_of(of, p) for of in sums.values())]
    names = ordered({name for of in sums.values() for name in of})
    first = next(iter(sums))
    rows = []
    for method in names:
        for name, result in results.items():
            pairs = _pairs(sums[name], method, used)
            if pairs is None:
                continue
            base = _pairs(sums[first], method, used) if name != first else None
            cost = result.cost.get(method) if not dataset else None
            rows.append(
                Measured(
                    result=name,
                    method=method,
                    tau=sum(t for t, _ in pairs) / sum(n for _, n in pairs),
                    interval=tau_interval(*zip(*pairs, strict=True), seed=_SEED),
                    speedup=cost.get("speedup_wall") if cost else None,
                    to_first=None if base is None else paired(base, pairs, seed=_SEED),
                )
            )
    return Table(dataset=dataset, prompts=len(used), rows=tuple(rows))


def _rounds_of(of: _Pairs, prompt: str) -> bool:
    return all(pairs[prompt][1] > 0 for pairs in of.values() if prompt in pairs)


def _pairs(of: _Pairs, method: str, prompts: Sequence[str]) -> list[tuple[int, int]] | None:
    """None where the method was not measured on all of them, or there are none."""
    known = of.get(method, {})
    return [known[p] for p in prompts] if prompts and all(p in known for p in prompts) else None


def _notes(results: Mapping[str, _Result], shared: int) -> Iterator[str]:
    (first_name, first), *others = results.items()
    for name, result in results.items():
        own = len({a.prompt_id for a in result.prompts})
        if own > shared:
            yield (
                f"{name}: {counted(own - shared, 'prompt')} of {own} left out, which others have "
                f"not scored; all τ are over the {shared} in common"
            )
    for name, result in others:
        for key, what in _MUST_AGREE:
            made, asked = first.provenance.get(key), result.provenance.get(key)
            # An older version did not record all of them.
            if made != asked and None not in (made, asked):
                yield (
                    f"{name}: {what} than {first_name} ({made} and {asked}): a difference is not "
                    "the drafter's alone"
                )
        if _temperatures(first) != _temperatures(result):
            yield (
                f"{name}: other temperatures than {first_name} ({_temperatures(first)} and "
                f"{_temperatures(result)}): methods are compared at the same one alone"
            )
        if any(first.provenance.get(k) != result.provenance.get(k) for k in _SPEED_AGREES):
            yield f"{name}: measured on another machine than {first_name}: speed-ups do not compare"
        if first.provenance.get("drafter") == result.provenance.get("drafter"):
            yield f"{name}: the very drafter of {first_name}"


def _temperatures(result: _Result) -> str:
    found = [s["temperature"] for s in result.settings] or [result.provenance.get("temperature", 0)]
    return ", ".join(f"{t:g}" for t in found)
