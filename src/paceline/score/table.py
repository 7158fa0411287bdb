"""The score for the terminal: one table, and the sentences that it needs to be read rightly."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.watch.words import counted, speed_advice

_WIDTH = 100
"""Columns of a terminal that shows the tables unbroken."""


def result_lines(result: dict[str, Any]) -> tuple[str, ...]:
    """Lines of text for a decoded result.json."""
    console = Console(width=_WIDTH, record=True, file=io.StringIO(), color_system=None)
    console.print(_tau_table(result))
    console.print(_dataset_table(result))
    if result["cost"]:
        console.print(_cost_table(result))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return (*lines, *_sentences(result))


def _tau_table(result: dict[str, Any]) -> Table:
    table = Table(title="acceptance length τ: tokens per verification, the target's own included")
    for name in ("method", "how"):
        table.add_column(name)
    for name in ("τ", "95 %", "mean of prompts", "rounds", "reached depth 1, 2, 3"):
        table.add_column(name, justify="right")
    for name, pooled in result["pooled"].items():
        table.add_row(
            name,
            pooled["how"],
            f"{pooled['tau']:.3f}",
            _interval(*pooled["tau_interval"]),
            f"{pooled['tau_prompt_mean']:.3f}",
            str(pooled["rounds"]),
            " ".join(f"{share:.2f}" for share in [*pooled["by_depth"], 0.0, 0.0, 0.0][:3]),
        )
    return table


def _interval(low: float, high: float) -> str:
    """A dash where there is none: resampling a single prompt gives that prompt each time."""
    return f"{low:.2f}-{high:.2f}" if low < high else "–"


def _dataset_table(result: dict[str, Any]) -> Table:
    table = Table(title="τ by data set")
    table.add_column("data set", overflow="fold")
    table.add_column("prompts", justify="right")
    methods = list(result["pooled"])
    for method in methods:
        table.add_column(method, justify="right")
    for dataset, found in result["datasets"].items():
        prompts = str(found[methods[0]]["prompts"])
        table.add_row(dataset, prompts, *(f"{found[method]['tau']:.3f}" for method in methods))
    return table


def _cost_table(result: dict[str, Any]) -> Table:
    table = Table(
        title="a round's cost in plain steps (CPU time); the speed-up, measured, and projected to "
        "a verification that costs 1, 1.1, ... plain steps"
    )
    costs = result["cost"]
    steps = list(next(iter(costs.values()))["projected"])
    for name in ("method", "verify", "draft", "CPU", "wall", *(f"at {step}" for step in steps)):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, cost in costs.items():
        table.add_row(
            name,
            f"{cost['verify']:.2f}",
            f"{cost['draft']:.2f}",
            f"{cost['speedup_cpu']:.2f}x",
            f"{cost['speedup_wall']:.2f}x",
            *(f"{cost['projected'][step]:.2f}x" for step in steps),
        )
    return table


def _sentences(result: dict[str, Any]) -> list[str]:
    lossless, plain, origin = result["lossless"], result["plain"], result["provenance"]
    milliseconds = plain["cpu_seconds_per_token"] * 1000
    prompts = counted(origin["prompts"], "prompt")
    limit = counted(origin["max_new_tokens"], "new token")
    threads = counted(origin["threads_per_process"], "thread")
    processes = f"{counted(origin['processes'], 'process')} of {threads}"
    identical = f"{lossless['identical']} of {lossless['checked']}"
    others = (
        f"{lossless['near_ties']} differ at a near tie, {len(lossless['violations'])} otherwise"
    )
    walked = f"{lossless['walk_equal']} of {lossless['walk_checked']}"
    sentences = [
        (
            f"{prompts}, at most {limit} each, "
            f"greedy, {origin['dtype']}, batch 1, target {origin['target']}"
        ),
        f"plain decoding: {milliseconds:.1f} ms CPU per token in the same loop, {processes}",
        f"lossless: {identical} speculative answers are the plain answer token for token, {others}",
        f"walk: {walked} decoded answers have exactly the rounds that the walk computes",
    ]
    if all(pooled["tau"] <= 1.0 for pooled in result["pooled"].values()):
        sentences.append("warning: nothing that the drafter proposed was accepted")
    costs = {n: (c["speedup_wall"], c["projected"]["1"]) for n, c in result["cost"].items()}
    return [*sentences, *speed_advice(costs)]
