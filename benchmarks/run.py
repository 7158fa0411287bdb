"""Print one JSON line for each measurement: name, value, unit, target, ok, how.

    python benchmarks/run.py [--only NAME]

A benchmark is a module beside this file with `measure()`, which returns such a dict or several.
The exit code is 0 whatever they say: numbers are for reading, tests are for failing.
"""

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence
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
    "resume_exact",
)
KEYS = ("name", "value", "unit", "target", "ok", "how")

Measurement = dict[str, Any]


def run(name: str) -> list[Measurement]:
    """Measure one benchmark; whatever goes wrong in it becomes a measurement that is not ok."""
    try:
        module = importlib.import_module(name)
        # A line that a library prints must not land between the JSON lines.
        with contextlib.redirect_stdout(sys.stderr):
            measured = module.measure()
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
    parser.add_argument("--only", choices=BENCHMARKS, help="one benchmark instead of all")
    options = parser.parse_args(arguments)
    for name in [options.only] if options.only else BENCHMARKS:
        for measurement in run(name):
            print(json.dumps(measurement, ensure_ascii=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
