"""`paceline report`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli.terminal import say
from paceline.durable.errors import PacelineError, storage_refused
from paceline.recipe.run_dir import RunDir

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Writes a run on one page: curves, acceptance, speed, decoded text, corpus and recipe. Of a
    run that is at work, was stopped or has died it shows what there is, and says what is missing.

    Reads: the records, events, corpus and result of the run, and the target's tokenizer.

    Writes: one HTML file that needs no network; nothing else. `run` and `score` write it too.

    Example: paceline report runs/demo
    """  # noqa: D205

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: report.html in the run)"),
    ] = None
    """Where to write the page."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    from paceline.report.write import write_report

    say(f"wrote {write_report(RunDir(args.run), args.out)}")
    return 0


def add_report(run_dir: RunDir) -> int:
    """Write the report after the work of another command; the exit code, 1 with a reason said.

    A run in a folder that can no longer be written keeps the report that it has.
    """
    from paceline.report.write import is_current, write_report

    try:
        write_report(run_dir)
    except PacelineError as error:
        reason = str(error)
    except OSError as error:
        if is_current(run_dir):
            return 0
        reason = str(storage_refused(error) or error)
    except Exception as error:  # noqa: BLE001  a fault of the page must not look like the run's
        _log.exception("the report")
        reason = f"{type(error).__name__}: {error} (a fault in Paceline; the log says where)"
    else:
        return 0
    say(f"not done: report: {reason}")
    return 1
