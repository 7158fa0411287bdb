"""Print one JSON line for each measurement: name, value, unit, target, ok, how.

    python benchmarks/run.py [--only NAME [KEY=VALUE ...]]

A benchmark is a module beside this file with `measure()`, which returns such a dict or several and
takes the values of --only as text.
The exit code is 0 whatever they say: numbers are for reading, tests are for failing.
"""

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

BENCHMARKS = (
    "demo_tau",
    "overfit",
    "extract_efficiency",
    "codec_sizes",
    "codec_tau",
    "dflash_step",
    "loss_memory",
    "status_time",
    "resume_million",
    "kill_tiny",
    "averaging_tau",
    "resume_exact",
    "prepare_speed",
    "tree_speed",
)
LONG = ("score_exact",)
"""Run by name alone: they take an hour or more."""
PEERS = ("peers.step", "peers.tau")
"""Run by name alone: they need another project's package, in the environment of `bench-peers`."""
KEYS = ("name", "value", "unit", "target", "ok", "how")

Measurement = dict[str, Any]


def run(name: str, values: Mapping[str, str] | None = None) -> list[Measurement]:
    """Measure one benchmark; whatever goes wrong in it becomes a measurement that is not ok."""
    try:
        module = importlib.import_module(name)
        # A line that a library prints must not land between the JSON lines.
        with contextlib.redirect_stdout(sys.stderr):
            measured = module.measure(**(values or {}))
        measurements = [measured] if isinstance(measured, dict) else list(measured)
        for measurement in measurements:
            if set(measurement) != set(KEYS):
                raise ValueError(f"measure() gave the keys {sorted(measurement)}, not {KEYS}")
            json.dumps(measurement, allow_nan=False)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one must not hide the others
        how = f"{type(error).__name__}: {error}"
        failed = dict.fromkeys(KEYS) | {"name": name, "ok": False, "how": how}
        return [failed]
    return measurements


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 0."""
    parser = argparse.ArgumentParser(description="One JSON line for each measurement.")
    parser.add_argument("--only", choices=BENCHMARKS + LONG + PEERS, help="one benchmark, not all")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="what that one takes")
    options = parser.parse_args(arguments)
    if options.values and not options.only:
        parser.error("KEY=VALUE: name the benchmark with --only")
    values = dict(value.partition("=")[::2] for value in options.values)
    for name in [options.only] if options.only else BENCHMARKS:
        for measurement in run(name, values):
            print(json.dumps(measurement, ensure_ascii=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
