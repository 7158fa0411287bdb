"""τ of a drafter on greedy answers, by the walk of `paceline score`, and how sure it is.

The answers do not depend on the drafter, so they are made once for all of them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from paceline.decode.speculate import decode_plain
from paceline.drafter.checkpoint import load_drafter
from paceline.durable.fs import write_atomic
from paceline.recipe.score_inputs import score_settings
from paceline.score.choose import choose_prompts
from paceline.score.prompt import walked_rounds
from paceline.target.load import load_target
from paceline.types.sample import Split, read_samples

from .training import Bench

BUDGETS = (16, 64)
METHODS = ("chain", "ddtree-16", "ddtree-64")
HELD_OUT, VALIDATION, BOTH = "held-out prompts", "validation samples", "both"
SETS = {HELD_OUT: (HELD_OUT,), VALIDATION: (VALIDATION,), BOTH: (HELD_OUT, VALIDATION)}

_DRAWS = 4000

Counts = dict[str, list[tuple[int, int]]]
"""Tokens committed and rounds of each prompt, by method."""


@dataclass(frozen=True, kw_only=True)
class Walkable:
    """A greedy answer with the features that a drafter would have seen."""

    name: str
    taps: torch.Tensor
    input_ids: torch.Tensor
    prompt: int
    """Tokens before the answer."""
    stop: int
    """As in `walk_rounds`, and `end`."""
    end: int | None


def held_out(bench: Bench, folder: Path) -> list[Walkable]:
    """The target's answers to the prompts that `score` takes, decoded into `folder` once."""
    recipe = bench.recipe
    block, most = recipe.drafter.block_size, score_settings(recipe.score).max_new_tokens
    # The last round of a walk looks a block beyond the limit.
    length = most + block - 1
    prompts = choose_prompts(recipe, bench.run)
    files = {p.prompt_id: folder / f"{p.prompt_id}-{length}.safetensors" for p in prompts}
    missing = [p for p in prompts if not files[p.prompt_id].is_file()]
    if missing:
        target = load_target(recipe.target)
        for prompt in missing:
            plain = decode_plain(
                target,
                prompt.input_ids,
                taps=bench.reader.manifest.layer_ids,
                max_new_tokens=length,
                eos_ids=frozenset(bench.spec.eos_token_ids),
            )
            tensors = {"ids": torch.tensor(plain.ids), "taps": plain.features.contiguous()}
            data = save(tensors, metadata={"finish": plain.finish})
            write_atomic(files[prompt.prompt_id], data)
    made = []
    for prompt in prompts:
        with safe_open(files[prompt.prompt_id], framework="pt") as file:
            ids, taps = file.get_tensor("ids"), file.get_tensor("taps")
            is_ended = (file.metadata() or {})["finish"] == "stop"
        made.append(
            Walkable(
                name=prompt.prompt_id,
                taps=taps,
                input_ids=torch.cat([torch.tensor(prompt.input_ids), ids]),
                prompt=len(prompt.input_ids),
                stop=min(ids.numel(), most),
                end=ids.numel() if is_ended else None,
            )
        )
    return made


def validation(bench: Bench) -> Iterator[Walkable]:
    """The last answers of all validation samples, from the store."""
    block = bench.recipe.drafter.block_size
    finishes = {
        sample.sample_id: sample
        for sample in read_samples(bench.run.samples(bench.recipe))
        if sample.split is Split.VALIDATION
    }
    for index, name in enumerate(bench.reader.sample_ids):
        if name not in finishes:
            continue
        sample = finishes[name]
        start, end = sample.loss_spans[-1]
        is_ended, length = sample.finish == "stop", end - start
        features = bench.reader.read(index)
        yield Walkable(
            name=name,
            taps=features.taps[: end - 1],
            input_ids=features.tokens.input_ids[:end],
            prompt=start,
            # What an answer that was cut off would have gone on with is not known.
            stop=length if is_ended else max(0, length - block + 1),
            end=length if is_ended else None,
        )


def walked(
    bench: Bench, drafter_folder: Path, answers: Mapping[str, Sequence[Walkable]], kept: Path
) -> dict[str, Counts]:
    """Tokens and rounds of each answer, by set; measured once and kept in `kept`."""
    names = [f"{group}/{a.name}/{a.stop}" for group, found in answers.items() for a in found]
    digest = hashlib.sha256("\n".join([str(drafter_folder), *names]).encode()).hexdigest()[:16]
    if kept.is_file():
        found = json.loads(kept.read_text())
        if found["of"] == digest:
            return found["counts"]
    drafter = load_drafter(drafter_folder)
    head = bench.head(drafter)
    counts: dict[str, Counts] = {}
    for group, wanted in answers.items():
        counts[group] = {method: [] for method in METHODS}
        for answer in wanted:
            rounds = walked_rounds(
                drafter,
                head,
                answer.taps,
                answer.input_ids,
                prompt=answer.prompt,
                stop=answer.stop,
                end=answer.end,
                budgets=BUDGETS,
            )
            for method in METHODS:
                counts[group][method].append((sum(rounds[method]), len(rounds[method])))
    write_atomic(kept, json.dumps({"of": digest, "counts": counts}).encode())
    return counts


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


class Taus:
    """Pooled τ of an arm, with the same draws of prompts for every arm."""

    def __init__(self, counts: Mapping[str, Counts]) -> None:
        self._counts = counts

    def tau(self, over: str, method: str) -> Estimate:
        """Over the prompts of one of SETS."""
        tokens, rounds = self.arrays(over, method)
        return _estimate(_pooled(tokens, rounds), _drawn(tokens, rounds))

    def difference(self, other: "Taus", over: str, method: str) -> Estimate:
        """Of this arm's τ to another's on the same prompts."""
        own, base = self.arrays(over, method), other.arrays(over, method)
        return _estimate(_pooled(*own) - _pooled(*base), _drawn(*own) - _drawn(*base))

    def prompts(self, over: str) -> int:
        """How many there are."""
        return self.arrays(over, METHODS[0])[0].size

    def arrays(self, over: str, method: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and rounds of each prompt."""
        pairs = [pair for group in SETS[over] for pair in self._counts[group][method]]
        both = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


def _pooled(tokens: np.ndarray, rounds: np.ndarray) -> float:
    return float(tokens.sum() / rounds.sum())


def _drawn(tokens: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    # The same seed and size give the same draws: that is what pairs two arms.
    draws = np.random.default_rng(0).integers(0, tokens.size, size=(_DRAWS, tokens.size))
    return tokens[draws].sum(axis=1) / rounds[draws].sum(axis=1)


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(round(value, 4), round(float(low), 4), round(float(high), 4))
