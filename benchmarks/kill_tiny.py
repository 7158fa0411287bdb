"""A run killed at a random moment, fifty times: `measure()` counts what differs afterwards.

Each run has a directory of its own, is killed by SIGKILL, now and then once more after it was
resumed, and is then gone on with to the end. Corpus, answers, shards, training losses, weights and
score have to be those of a run that nobody disturbed.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The toy target and the comparison of runs are the tests' own.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from paceline.recipe.run_dir import RunDir
from random_kills import random_kills, undisturbed
from run_server import RunServer
from tiny_run import tiny_project

KILLS = 50
TWICE = 12


def measure(kills: int = KILLS, twice: int = TWICE, seed: int | None = None) -> dict[str, Any]:
    """Differences between killed runs and an undisturbed one, over all of them."""
    started = time.monotonic()
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    with tempfile.TemporaryDirectory() as name, RunServer(Path(name) / "log") as server:
        folder = Path(name)
        recipe = tiny_project(folder)
        wanted = undisturbed(server, recipe, RunDir(folder / "undisturbed"))
        outcome = random_kills(
            server, recipe, wanted, folder, count=kills, twice=twice, rng=random.Random(seed)
        )
    by_stage = ", ".join(f"{outcome.kills[stage]} in {stage}" for stage in wanted.seconds)
    found = outcome.differences
    return {
        "name": "kill_tiny",
        "value": len(found),
        "unit": "differences",
        "target": 0,
        "ok": not found and outcome.kills.total() == kills and outcome.twice == twice,
        "how": (
            f"recipes/tiny.yaml, {sum(wanted.seconds.values()):.2f} s undisturbed; "
            f"{outcome.kills.total()} runs killed by SIGKILL ({by_stage}), {outcome.twice} of them "
            f"once more after the resume, each resumed to its end; seed {seed}; half of the "
            "moments uniform over the run, half within each stage in turn; "
            f"{outcome.redrawn} lay behind the end and were drawn again; compared: every file but "
            "events, journals, reports and times, and the losses of every step; "
            f"{time.monotonic() - started:.0f} s"
            + (f"; the first differences: {'; '.join(found[:5])}" if found else "")
        ),
    }
