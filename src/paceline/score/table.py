"""The score for the terminal: one table, and the sentences that it needs to be read rightly."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.score.results import chain_name
from paceline.watch.words import counted, speed_advice

_WIDTH = 100
"""Columns of a terminal that shows the tables unbroken."""


def result_lines(result: dict[str, Any]) -> tuple[str, ...]:
    """Lines of text for a decoded result.json."""
    console = Console(width=_WIDTH, record=True, file=io.StringIO(), color_system=None)
    console.print(_tau_table(result))
    console.print(_dataset_table(result))
    for key, title in (("lengths", "context"), ("languages", "language"), ("domains", "domain")):
        if _is_news(result, key):
            console.print(_slice_table(result, key, title))
    if result["cost"]:
        console.print(_cost_table(result))
        console.print(_time_table(result))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    return (*lines, *_sentences(result))


def _tau_table(result: dict[str, Any]) -> Table:
    table = Table(title="acceptance length τ: tokens per verification, the target's own included")
    for name in ("method", "how"):
        table.add_column(name)
    pooled_first = result["provenance"]["convention"]["average"] == "pooled"
    averages = ["τ", "95 %", "mean of prompts"]
    for name in averages if pooled_first else [averages[2], *averages[:2]]:
        table.add_column(name, justify="right")
    for name in ("rounds", "reached depth 1, 2, 3"):
        table.add_column(name, justify="right")
    for name, pooled in result["pooled"].items():
        tau, mean = f"{pooled['tau']:.3f}", f"{pooled['tau_prompt_mean']:.3f}"
        interval = _interval(*pooled["tau_interval"])
        table.add_row(
            name,
            pooled["how"],
            *((tau, interval, mean) if pooled_first else (mean, tau, interval)),
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


def _is_news(result: dict[str, Any], key: str) -> bool:
    """Whether a division says more than the pooled numbers, and the data sets, do."""
    return len(result[key]) > 1 and not (
        key == "domains" and {*result[key]} == {*result["datasets"]}
    )


def _slice_table(result: dict[str, Any], key: str, title: str) -> Table:
    table = Table(title=f"τ by {title}")
    table.add_column(title, overflow="fold")
    methods = list(result["pooled"])
    for name in ("prompts", *methods):
        table.add_column(name, justify="right")
    for name, found in result[key].items():
        prompts = max(one["prompts"] for one in found.values())
        taus = (f"{found[m]['tau']:.3f}" if m in found else "–" for m in methods)
        table.add_row(name, str(prompts), *taus)
    return table


_PHASES = ("draft", "tree", "verify", "commit")


def _time_table(result: dict[str, Any]) -> Table:
    table = Table(title="a round's milliseconds, CPU (and wall where it is measured by phase)")
    for name in ("method", *_PHASES, "wall in all", "prefill of a prompt"):
        table.add_column(name, justify="left" if name == "method" else "right")
    answers = result["provenance"]["answers"]
    for name, timing in result["timings"].items():
        rounds = max(timing["rounds"], 1)
        cpu, wall = timing["cpu_seconds"], timing["phase_seconds"]
        table.add_row(
            name,
            *(_milliseconds(cpu, wall, phase, rounds) for phase in _PHASES),
            f"{1000 * timing['wall_seconds'] / rounds:.1f}",
            _milliseconds(cpu, wall, "prefill", max(answers, 1)),
        )
    return table


def _milliseconds(cpu: dict[str, float], wall: dict[str, float], phase: str, times: int) -> str:
    if phase not in cpu:
        return "–"
    shown = f"{1000 * cpu[phase] / times:.1f}"
    return f"{shown} ({1000 * wall[phase] / times:.1f})" if phase in wall else shown


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
    lossless, origin = result["lossless"], result["provenance"]
    first = result["settings"][0]
    milliseconds = first["plain"]["cpu_seconds_per_token"] * 1000
    temperatures = [setting["temperature"] for setting in result["settings"]]
    how = "greedy" if temperatures == [0] else f"temperature {', '.join(map(_short, temperatures))}"
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
            f"{how}, {origin['dtype']}, batch 1, target {origin['target']}"
        ),
        f"plain decoding: {milliseconds:.1f} ms CPU per token in the same loop, {processes}",
        f"lossless: {identical} speculative answers are the plain answer token for token, {others}",
        f"walk: {walked} decoded answers have exactly the rounds that the walk computes",
    ]
    if any(name.startswith(chain_name("sampled")) for name in result["pooled"]):
        sentences.append(
            "chains that are sampled have answers of their own, equal to the target's in "
            "distribution, which are not compared"
        )
    sentences += _convention(result, temperatures) + _overlap(result)
    if all(pooled["tau"] <= 1.0 for pooled in result["pooled"].values()):
        sentences.append("warning: nothing that the drafter proposed was accepted")
    costs = {n: (c["speedup_wall"], c["projected"]["1"]) for n, c in result["cost"].items()}
    return [*sentences, *speed_advice(costs)]


def _convention(result: dict[str, Any], temperatures: list[float]) -> list[str]:
    origin = result["provenance"]["convention"]
    if origin["name"] == "paceline":
        return []
    said = ", ".join(f"{key} {value}" for key, value in origin["set_by_recipe"].items())
    first = {"pooled": "the pooled τ", "prompt_mean": "the mean of prompts"}[origin["average"]]
    sentences = [
        f"convention {origin['name']}: {first} is what that harness reports"
        + (f"; the recipe set {said}" if said else "")
    ]
    missing = [t for t in origin["temperatures"] if t not in temperatures]
    if missing:
        sentences.append(
            f"that harness measures at temperature {', '.join(map(_short, missing))} too, "
            "which is not measured here"
        )
    return sentences


def _overlap(result: dict[str, Any]) -> list[str]:
    shared = [
        f"{name} {one['shared_fraction']:.1%}"
        for name, one in result["overlap"].items()
        if one["shared_grams"]
    ]
    if not result["overlap"]:
        return []
    if not shared:
        return ["overlap: no 8-gram of the prompts is in a training prompt"]
    return [f"overlap: 8-grams that are in training prompts too: {', '.join(shared)}"]


def _short(value: float) -> str:
    return f"{value:g}"
