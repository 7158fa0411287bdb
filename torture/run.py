"""Break everything that can be broken, in every way, and look at what is lost.

    python torture/run.py [--only GATE] [--seed N] [--scale full|small]

Prints one line a gate: whether it passed, its seed, what was done, seconds; below a gate that
failed, what it found. The same seed throws the same dice. The last line is `N gates passed,
M failed`; the exit code is 1 where one failed.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# The gates, their worlds and the servers are the tests' own.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from torture_gates import GATES, Gate, Result, Scale, World

_SHOWN = 20
"""Problems of one gate that are printed."""


def run_gate(gate: Gate, seed: int, scale: Scale) -> bool:
    """Run one gate and print its line; whether it passed. Whatever it raises is a failure."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        world = World(Path(name), seed, scale)
        try:
            result = gate.run(world)
        except Exception as error:  # noqa: BLE001 - one must not hide the others
            result = Result("did not come to its end", [f"{type(error).__name__}: {error}"])
        finally:
            world.close()
    how = "FAILED" if result.problems else "passed"
    seconds = time.monotonic() - began
    print(f"{gate.name}: {how}, seed {seed}, {seconds:.0f} s: {result.counts}", flush=True)
    for problem in result.problems[:_SHOWN]:
        print(f"    {problem}", flush=True)
    if len(result.problems) > _SHOWN:
        print(f"    and {len(result.problems) - _SHOWN:,} more", flush=True)
    if result.problems:
        again = f"python torture/run.py --only {gate.name} --seed {seed} --scale {scale}"
        print(f"    again: {again}", flush=True)
    return not result.problems


def main(arguments: Sequence[str] | None = None, gates: Sequence[Gate] = GATES) -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description="Break everything, and look at what is lost.")
    names = [gate.name for gate in gates]
    parser.add_argument("--only", choices=names, help="one gate instead of all")
    parser.add_argument("--seed", type=int, help="of the dice; a new one where it is not given")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="how much of it")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    chosen = [gate for gate in gates if options.only in (None, gate.name)]
    passed = sum([run_gate(gate, seed, options.scale) for gate in chosen])
    print(f"{passed} gates passed, {len(chosen) - passed} failed", flush=True)
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
