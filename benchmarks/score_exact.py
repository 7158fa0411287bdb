"""Whether speculative answers are the target's own, token for token, on the real target.

In fp32 an answer may first differ where the target's choice, computed again in fp64, is closer than
a thousandth of a logit; each such place is listed. In bf16 closer than a quarter, counted. The
drafter is that of `run`, or without one an untrained one that is pushed towards the answer.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pushed import Pushed, pushed_drafter

from paceline.decode.pair import Pair, load_pair
from paceline.decode.sampling import GREEDY, PositionKeyedNoise, Sampling, choice_margin
from paceline.decode.simulate import method_name
from paceline.decode.speculate import decode_plain, decode_speculative
from paceline.flow.launch import map_items
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import TargetRecipe
from paceline.recipe.stage import read_record
from paceline.target.load import load_target

CACHE = Path(__file__).resolve().parents[1] / ".cache"
GREEDY_PLAN: dict[int | None, int] = {None: 200, 8: 200, 16: 200, 64: 40, 256: 10}
"""Prompts by budget; None is the chain."""
DRAWN_PLAN: dict[int | None, int] = {None: 100, 16: 100}
TEMPERATURES = (0.7, 1.0)
BFLOAT16_PLAN: dict[int | None, int] = {None: 40, 16: 40}
TOKENS, LONGEST = 32, 400
LAYERS, DEPTH = 3, 15
NEAR = {"float32": 1e-3, "bfloat16": 0.25}
RARE = 1e-4
"""Differences per token that are allowed in fp32."""


@dataclass(frozen=True)
class Job:
    """What a process is told."""

    target: TargetRecipe
    checkpoint: Path | None


@dataclass(frozen=True)
class Item:
    """One prompt, with the budgets that it is decoded with."""

    key: str
    ids: tuple[int, ...]
    sampling: Sampling
    budgets: tuple[int | None, ...]


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that is not plain decoding's."""

    item: Item
    method: str
    answer: tuple[int, ...]
    """Plain decoding's."""
    place: int
    margin: float
    """As the target itself has it, in its own type."""


@dataclass(frozen=True)
class Found:
    """What a prompt gave."""

    tokens: int
    rounds: int
    differences: tuple[Difference, ...]


def measure(
    target: str = str(CACHE / "smollm2"),
    run: str = "",
    share: str = "1",
    workers: str = "2",
) -> Iterator[dict[str, Any]]:
    """Greedy, drawn and bf16 answers; `share` takes a part of the prompts, for a trial."""
    recipe = TargetRecipe(path=target, workers=1, threads=1)
    checkpoint = None
    if run:
        stored = read_record(RunDir(Path(run)).checkpoints, "train")
        if stored is None:
            raise ValueError(f"{run}: no trained drafter")
        checkpoint = RunDir(Path(run)).checkpoints / stored.report["best"]
    plans = [("greedy", "float32", GREEDY, GREEDY_PLAN)]
    plans += [(f"t{t:g}", "float32", Sampling(temperature=t), DRAWN_PLAN) for t in TEMPERATURES]
    plans.append(("greedy", "bfloat16", GREEDY, BFLOAT16_PLAN))
    prompts = _prompts(recipe)
    for name, dtype, sampling, plan in plans:
        counts = {budget: max(1, int(n * float(share))) for budget, n in plan.items()}
        items = [
            Item(key, ids, sampling, tuple(b for b, count in counts.items() if at < count))
            for at, (key, ids) in enumerate(prompts[: max(counts.values())])
        ]
        found: list[Found] = []
        map_items(
            _decoder,
            Job(replace(recipe, dtype=dtype), checkpoint),
            items,
            workers=int(workers),
            threads=1,
            on_result=lambda _, one, found=found: found.append(one),
        )
        yield _judged(f"score_exact_{name}_{dtype}", recipe, dtype, counts, found)


def _judged(
    name: str,
    recipe: TargetRecipe,
    dtype: str,
    counts: dict[int | None, int],
    found: list[Found],
) -> dict[str, Any]:
    tokens = sum(one.tokens for one in found)
    differences = [d for one in found for d in one.differences]
    margins = _exact_margins(recipe, differences) if dtype == "float32" else None
    listed, wrong = [], 0
    for at, one in enumerate(differences):
        margin = one.margin if margins is None else margins[at]
        wrong += margin >= NEAR[dtype]
        listed.append(f"{one.item.key}/{one.method}@{one.place} by {margin:.2g}")
    share = len(differences) / tokens
    plan = ", ".join(f"{count} with {method_name(budget)}" for budget, count in counts.items())
    rounds = sum(one.rounds for one in found)
    return {
        "name": name,
        "value": len(differences),
        "unit": f"answers that differ, of {sum(counts.values())}",
        "target": round(RARE * tokens, 2) if dtype == "float32" else None,
        "ok": not wrong and (dtype != "float32" or share <= RARE),
        "how": f"{plan}; {tokens:,} tokens in {rounds:,} rounds; {wrong} of the differences where "
        f"the choice is not within {NEAR[dtype]:g}; {', '.join(listed) or 'none'}",
    }


def _prompts(recipe: TargetRecipe) -> list[tuple[str, tuple[int, ...]]]:
    """Of all data sets of the demo, in the order of their hashes."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(recipe.path, local_files_only=True)
    found = []
    for file in sorted((CACHE / "prompts").glob("*.jsonl")):
        # Not splitlines, which also ends a line within the text of some.
        for line in file.read_bytes().split(b"\n"):
            if not line:
                continue
            row = json.loads(line)
            text = tokenizer.apply_chat_template(
                row["messages"], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) <= LONGEST:
                found.append((str(row["id"]), tuple(ids)))
    return sorted(found, key=lambda one: hashlib.sha256(one[0].encode()).digest())


def _decoder(job: Job) -> Callable[[Item], Found]:
    if job.checkpoint is not None:
        pair = load_pair(job.target, job.checkpoint)
    else:
        loaded = load_target(job.target)
        pushed = pushed_drafter(loaded, layers=LAYERS, depth=DEPTH).to(loaded.model.dtype)
        pair = Pair(loaded, pushed, loaded.head)
    return lambda item: _decode(pair, item)


def _decode(pair: Pair, item: Item) -> Found:
    noise = PositionKeyedNoise(0, item.key)
    how: dict[str, Any] = {"eos_ids": pair.eos_ids, "sampling": item.sampling, "noise": noise}
    taps = pair.drafter.config.taps
    plain = decode_plain(pair.target, item.ids, taps=taps, max_new_tokens=TOKENS, **how)
    if isinstance(pair.drafter, Pushed):
        pair.drafter.answer = torch.tensor([*item.ids, *plain.ids])
        pair.drafter.rows = pair.target.head.lm_head
    tokens = rounds = 0
    differences = []
    for budget in item.budgets:
        got = decode_speculative(
            pair.target, pair.drafter, pair.head, item.ids, max_new_tokens=TOKENS, budget=budget,
            **how,
        )  # fmt: skip
        tokens, rounds = tokens + len(got.ids), rounds + len(got.rounds)
        if got.ids != plain.ids:
            pairs = zip(got.ids, plain.ids, strict=False)
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), len(plain.ids) - 1)
            differences.append(
                Difference(item, method_name(budget), plain.ids, place, plain.margins[place])
            )
    return Found(tokens, rounds, tuple(differences))


def _exact_margins(recipe: TargetRecipe, differences: list[Difference]) -> list[float]:
    """How close each choice was, in fp64."""
    if not differences:
        return []
    model: Any = load_target(recipe).model.double()
    margins = []
    for one in differences:
        ids = [*one.item.ids, *one.answer[: one.place]]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        noise = PositionKeyedNoise(0, one.item.key)
        margins.append(choice_margin(logits, noise, len(ids), one.item.sampling))
    return margins
