"""The score for the terminal: one table, and the sentences that it needs to be read rightly."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 100


def result_lines(result: dict[str, Any]) -> tuple[str, ...]:
    """Lines of text for a decoded result.json."""
    console = Console(width=_WIDTH, record=True, file=io.StringIO(), color_system=None)
    console.print(_tau_table(result))
    if result["cost"]:
        console.print(_cost_table(result))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return (*lines, *_sentences(result))


def _tau_table(result: dict[str, Any]) -> Table:
    table = Table(title="acceptance length τ (tokens per verification, bonus token included)")
    table.add_column("method")
    table.add_column("how")
    table.add_column("τ pooled", justify="right")
    table.add_column("95 %", justify="right")
    table.add_column("τ by prompt", justify="right")
    datasets = list(result["datasets"])
    for dataset in datasets:
        table.add_column(dataset, justify="right")
    table.add_column("accepted to depth 1, 2, 3", justify="right")
    for name, pooled in result["pooled"].items():
        low, high = pooled["tau_interval"]
        table.add_row(
            name,
            pooled["how"],
            f"{pooled['tau']:.3f}",
            f"{low:.2f}-{high:.2f}",
            f"{pooled['tau_prompt_mean']:.3f}",
            *(f"{result['datasets'][d][name]['tau']:.2f}" for d in datasets),
            " ".join(f"{share:.2f}" for share in pooled["by_depth"][:3]) or "-",
        )
    return table


def _cost_table(result: dict[str, Any]) -> Table:
    table = Table(title="cost of a round in plain steps (CPU time), and the speed-up")
    table.add_column("method")
    table.add_column("verify", justify="right")
    table.add_column("draft", justify="right")
    table.add_column("measured CPU", justify="right")
    table.add_column("measured wall", justify="right")
    costs = result["cost"]
    steps = list(next(iter(costs.values()))["projected_free_draft"])
    for step in steps:
        table.add_column(f"if verify = {step}", justify="right")
    for name, cost in costs.items():
        table.add_row(
            name,
            f"{cost['verify']:.2f}",
            f"{cost['draft']:.2f}",
            f"{cost['speedup_cpu']:.2f}x",
            f"{cost['speedup_wall']:.2f}x",
            *(f"{cost['projected'][s]:.2f}x" for s in steps),
        )
    return table


def _sentences(result: dict[str, Any]) -> list[str]:
    lossless, plain, origin = result["lossless"], result["plain"], result["provenance"]
    milliseconds = plain["cpu_seconds_per_token"] * 1000
    processes = f"{origin['processes']} process(es) of {origin['threads_per_process']} thread(s)"
    identical = f"{lossless['identical']} of {lossless['checked']}"
    others = (
        f"{lossless['near_ties']} differ at a near tie, {len(lossless['violations'])} otherwise"
    )
    walked = f"{lossless['walk_equal']} of {lossless['walk_checked']}"
    sentences = [
        (
            f"{origin['prompts']} prompts, {origin['max_new_tokens']} new tokens each, greedy, "
            f"{origin['dtype']}, batch 1, target {origin['target']}"
        ),
        f"plain decoding: {milliseconds:.1f} ms CPU per token in the same loop, {processes}",
        f"lossless: {identical} speculative answers are the plain answer token for token, {others}",
        f"walk: {walked} decoded answers have exactly the rounds that the walk computes",
    ]
    if any(cost["speedup_wall"] < 1.0 for cost in result["cost"].values()):
        sentences.append(
            "Speculation that loses time here does so because a verification costs several plain "
            "steps on this machine; the last columns say what the same τ gives where it is cheaper."
        )
    return sentences
