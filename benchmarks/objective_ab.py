"""τ of the demo's drafter by training objective, for the same CPU time.

    python benchmarks/objective_ab.py [--run runs/demo] [--budget 420] [--arms ce-gamma,dpace]

Long: about an hour. It begins with the run of `make demo`, which it only reads, and keeps what it
makes in runs/ab: what is there is not made again.

Every arm (ab/arms.py) has the demo's drafter and data, and the same initial weights, order of
samples, anchors and thread. `--budget` CPU-seconds of this process are what its steps may take,
evaluations and checkpoints left out. A schedule has to know its end, so a few steps of each arm, in
turns, say what a sample costs, and with that how many samples the arm has. What its steps really
took is printed beside its τ.

τ is the walk's, which is exact: on the prompts that the demo is scored on, and on its validation
samples. The intervals are bootstrapped over prompts, and differences paired by prompt; what another
seed would change is not in them.

Prints a line of JSON for each arm as soon as it is measured, and a table in Markdown at the end.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ab.arms import Arm, arms_named
from ab.training import Bench, costs, open_bench, trained
from ab.walks import (
    BOTH,
    HELD_OUT,
    METHODS,
    SETS,
    VALIDATION,
    Estimate,
    Taus,
    held_out,
    validation,
    walked,
)

from paceline.durable.errors import PacelineError
from paceline.durable.fs import write_atomic
from paceline.features.manifest import load
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe

BUDGET = 420.0
WORK = Path("runs/ab")
CHANGES = (
    "train.threads=1",
    "train.evaluations=1",
    "train.eval_samples=4",
)
"""Of the demo's recipe, for every arm."""


def compare(
    source: RunDir, work: Path, arms: Sequence[Arm], *, budget: float, seed: int, prompts: int
) -> str:
    """Train and measure each arm; returns the tables. Raises ValueError where `work` is another's.

    Args:
        source: a run whose features are made, with `last`.
        work: where everything is kept.
        arms: the first is what the others are compared with.
        budget: CPU-seconds of an arm's steps.
        seed: of the training.
        prompts: of each held-out data set.

    """
    torch.set_num_threads(1)
    changes = (*CHANGES, f"train.seed={seed}", f"score.max_prompts={prompts}")
    recipe = load_recipe(source.recipe, changes)
    recipes = {arm.name: arm.of(recipe) for arm in arms}
    run = _linked(source, RunDir(work / "run"))
    bench = open_bench(recipe, run)
    answers = {HELD_OUT: held_out(bench, work / "answers"), VALIDATION: list(validation(bench))}
    own = work / f"budget-{budget:g}-seed-{seed}"
    cost = _costs(bench, recipes, own / "costs.json")
    outcomes: dict[str, dict[str, Any]] = {}
    taus: dict[str, Taus] = {}
    for name, asked in recipes.items():
        folder = own / name
        outcomes[name] = trained(bench, asked, folder, budget, cost[name])
        drafter = folder / outcomes[name]["drafter"]
        taus[name] = Taus(walked(bench, drafter, answers, folder / "walks.json"))
        line = _line(name, outcomes[name], taus)
        print(json.dumps(line, ensure_ascii=False), flush=True)
    return "\n\n".join(_table(over, outcomes, taus) for over in (HELD_OUT, BOTH))


def _linked(source: RunDir, run: RunDir) -> RunDir:
    """A run over corpus and features of another, which nothing from here on writes to."""
    if not load(source.features).last:
        raise ValueError(f"{source.features}: without `last`. Run `make demo` of this version.")
    run.root.mkdir(parents=True, exist_ok=True)
    for link, folder in ((run.corpus, source.corpus), (run.features, source.features)):
        if not link.is_symlink():
            link.symlink_to(folder.resolve())
        if link.resolve() != folder.resolve():
            raise ValueError(f"{link}: that of another run. Give another --work.")
    return run


def _costs(bench: Bench, recipes: Mapping[str, Recipe], kept: Path) -> dict[str, float]:
    """CPU-seconds of a sample, by arm, measured once."""
    found: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    if not recipes.keys() <= found.keys():
        found |= costs(bench, {n: r for n, r in recipes.items() if n not in found})
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps(found, indent=1).encode())
    return found


def _line(name: str, outcome: Mapping[str, Any], taus: Mapping[str, Taus]) -> dict[str, Any]:
    own, (first, *others) = taus[name], taus
    line = {
        "arm": name,
        **{key: value for key, value in outcome.items() if key not in ("made_with", "drafter")},
        "prompts": {over: own.prompts(over) for over in SETS},
        "tau": {o: {m: asdict(own.tau(o, m)) for m in METHODS} for o in SETS},
    }
    if others:
        line["less"] = first
        line["difference"] = {
            o: {m: asdict(own.difference(taus[first], o, m)) for m in METHODS} for o in SETS
        }
    return line


def _table(over: str, outcomes: Mapping[str, Mapping[str, Any]], taus: Mapping[str, Taus]) -> str:
    first = next(iter(taus))
    head = ["arm", "CPU s", "samples", *METHODS, *(f"{m}, to {first}" for m in METHODS)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, own in taus.items():
        rows.append(
            [
                name,
                f"{outcomes[name]['cpu_seconds']:.0f}",
                str(outcomes[name]["samples"]),
                *(_shown(own.tau(over, m), ".3f") for m in METHODS),
                *(
                    "" if name == first else _shown(own.difference(taus[first], over, m), "+.3f")
                    for m in METHODS
                ),
            ]
        )
    title = f"τ (95 %) over {taus[first].prompts(over)} answers: {', '.join(SETS[over])}"
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows)])


def _shown(estimate: Estimate, form: str) -> str:
    low, high = format(estimate.low, form), format(estimate.high, form)
    return f"{format(estimate.value, form)} ({low} to {high})"


def main() -> int:
    """Command line; 2 where what is asked for is impossible, 130 where a signal ended it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="a finished demo")
    parser.add_argument("--work", type=Path, default=WORK, help="where everything is kept")
    parser.add_argument("--budget", type=float, default=BUDGET, help="CPU-seconds of an arm")
    parser.add_argument("--arms", default="", help="some of them, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="of order, anchors and noise")
    parser.add_argument("--prompts", type=int, default=20, help="of each held-out data set")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    source = RunDir(asked.run)
    try:
        arms = arms_named(asked.arms)
        tables = compare(
            source,
            asked.work,
            arms,
            budget=asked.budget,
            seed=asked.seed,
            prompts=asked.prompts,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except PacelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"\n{tables}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
