"""What a draft tree costs: building one, and its part of a round on a real target.

The builder is timed on lists, as decoding has them. Best of many, because a machine that does other
things too makes some of them slower and none faster. The part of a round counts CPU time, for the
same reason; its drafter is untrained but pushed towards the answer at about half of its slots, so
that paths of all lengths are committed.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pushed import pushed_drafter

from paceline.decode.ddtree import build_tree, top_log_probs
from paceline.decode.speculate import decode_plain, decode_speculative
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import load_target

TARGET = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"
DEPTH, VOCABULARY = 15, 49152
MILLISECONDS = {64: 0.3, 256: 1.5}
REPEATS = 300
BUDGET, SHARE = 64, 0.08
ANSWER, LAYERS = 96, 3
PROMPT = "<|im_start|>user\nHow does bread rise?<|im_end|>\n<|im_start|>assistant\n"


def measure(target: str | Path = TARGET) -> list[dict[str, Any]]:
    """The builder's time at two budgets, and the part of a round; `target` is a model folder."""
    torch.set_num_threads(1)
    return [*(_builder(budget) for budget in MILLISECONDS), _share(Path(target))]


def _builder(budget: int) -> dict[str, Any]:
    logits = _logits()
    tokens, log_probs = top_log_probs(logits, budget)
    best = 1e3 * _best(lambda: build_tree(0, tokens, log_probs, budget), REPEATS)
    before = 1e3 * _best(lambda: top_log_probs(logits, budget), REPEATS // 10)
    depth = max(build_tree(0, tokens, log_probs, budget).depths)
    return {
        "name": f"tree_build_{budget}",
        "value": round(best, 4),
        "unit": "ms",
        "target": MILLISECONDS[budget],
        "ok": best <= MILLISECONDS[budget],
        "how": (
            f"best of {REPEATS} of build_tree on lists of {DEPTH} x {budget}; the deepest node is "
            f"at {depth}. The lists themselves, from logits of {DEPTH} x {VOCABULARY} on one "
            f"thread: {before:.2f} ms"
        ),
    }


def _logits() -> torch.Tensor:
    """Noise, and at each depth one token that is as likely as DFlash is sure: 0.9 to 0.3."""
    logits = torch.randn(DEPTH, VOCABULARY, generator=torch.Generator().manual_seed(0))
    sure = torch.linspace(0.9, 0.3, DEPTH)
    logits[:, 7] = logits.logsumexp(dim=-1) + (sure / (1 - sure)).log()
    return logits


def _best(work: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _share(folder: Path) -> dict[str, Any]:
    target = load_target(TargetRecipe(path=str(folder)))
    drafter = pushed_drafter(target, layers=LAYERS, depth=DEPTH)
    ids = target.tokenizer.encode(PROMPT)
    plain = decode_plain(
        target,
        ids,
        taps=drafter.config.taps,
        max_new_tokens=ANSWER + DEPTH,
        eos_ids=frozenset(),
    )
    drafter.answer, drafter.rows = torch.tensor([*ids, *plain.ids]), target.head.lm_head
    decoded = decode_speculative(
        target,
        drafter,
        target.head,
        ids,
        max_new_tokens=ANSWER,
        eos_ids=frozenset(),
        budget=BUDGET,
    )
    seconds = {name: spent for name, spent in decoded.cpu_seconds.items() if name != "prefill"}
    whole = sum(seconds.values())
    share = (seconds["tree"] + seconds["commit"]) / whole
    rounds = len(decoded.rounds)
    parts = ", ".join(f"{name} {1e3 * spent / rounds:.2f}" for name, spent in seconds.items())
    return {
        "name": f"tree_share_{BUDGET}",
        "value": round(share, 4),
        "unit": "of a round's CPU time",
        "target": SHARE,
        "ok": share <= SHARE,
        "how": (
            f"tree and commit of {rounds} rounds at budget {BUDGET} with {folder.name}, one "
            f"thread, tau {decoded.tau:.2f}; ms a round: {parts}"
        ),
    }
