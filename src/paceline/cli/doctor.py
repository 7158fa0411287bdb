"""`paceline doctor`."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from paceline.cli.stages import StageArgs
from paceline.cli.terminal import say
from paceline.durable.errors import UserError
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.write import check_run_recipe, is_run
from paceline.watch.words import counted

if TYPE_CHECKING:
    from paceline.doctor.findings import Diagnosis, Finding
    from paceline.doctor.world import MaskPreview

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Finds what will go wrong before anything is loaded: who holds the GPUs, now and after the
    next boot; paths that do not answer, or will not outlive it; staging left by other runs; an
    object store's permissions; free space; tokenizer, template and mask token; threads, limits,
    memory and clock.

    One line a finding, the worst first: what, why it matters, what mends it.

    Reads: the recipe, the paths that it names, and the machine. A path or a store that gives no
    answer within ten seconds is itself a finding.

    Writes: nothing here; into an object store one small probe object, which it deletes again.

    Exit code: 1 where there is an error, or, with --strict, a warning; else 0. 2 for a recipe that
    cannot be read.

    Example: paceline doctor recipe.yaml --set target.device=cuda:0
    """  # noqa: D205

    strict: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: errors)")
    ] = False
    """Let warnings make the exit code 1 as well."""
    json: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: text)")
    ] = False
    """Everything, as one JSON object (docs/operations.md, "Before a run")."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    from paceline.doctor.findings import Diagnosis

    started = time.monotonic()
    path = _recipe_path(args)
    findings, run_dir = _findings(args, path)
    diagnosis = Diagnosis.of(
        findings, recipe=str(path), run=str(run_dir), seconds=time.monotonic() - started
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(diagnosis), indent=1).decode(), flush=True)
    else:
        _show(diagnosis)
    return diagnosis.exit_code(strict=args.strict)


def _recipe_path(args: Args) -> Path:
    if args.recipe is not None:
        return args.recipe.expanduser().absolute()
    if args.run is None:
        raise UserError(
            "no recipe. Give one (`paceline doctor recipe.yaml`) or a run that has one "
            "(`paceline doctor --run runs/demo`)."
        )
    return RunDir(args.run.absolute()).recipe


def _findings(args: Args, path: Path) -> tuple[list["Finding"], Path]:
    """What was found, and the run directory."""
    from paceline.cli.plan import plan_for
    from paceline.doctor.examine import examine, silent_recipe, this_world
    from paceline.doctor.touch import touch

    if touch([path], _SECONDS)[path].kind == "silent":
        return [silent_recipe(path)], args.run or Path()
    if args.recipe is None and args.run is not None and is_run(args.run):
        check_run_recipe(path)
    recipe = load_recipe(path, args.overrides)
    root = (args.run or Path("runs") / recipe.name).expanduser().absolute()
    world = this_world(
        recipe,
        path,
        RunDir(root),
        first_row=_first_row,
        plan=plan_for,
        seconds=_SECONDS,
        home=_home(),
    )
    return examine(world), root


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None  # A user without one, as containers have.


def _first_row(recipe: Recipe) -> "MaskPreview":
    """Stages do not know each other: the command hands one what another makes."""
    from paceline.cli.terminal import marked_text
    from paceline.corpus.first_row import first_row
    from paceline.corpus.preview import TRAINED, preview
    from paceline.doctor.world import MaskPreview

    found = first_row(recipe)
    if found.sample is None:
        return MaskPreview(source=found.source, rejected=found.rejected)
    return MaskPreview(
        source=found.source,
        row=found.row,
        text=marked_text(preview(found.sample, found.tokenizer), marked=TRAINED),
        tokens=len(found.sample.input_ids),
        trained=found.sample.num_loss_tokens,
        is_prompt=recipe.regenerate.enabled,
        rejected=found.rejected,
    )


def _show(diagnosis: "Diagnosis") -> None:
    for finding in diagnosis.findings:
        _line(finding)
    counts = diagnosis.counts
    summary = ", ".join(
        [counted(counts[name], name) for name in ("error", "warning", "note")]
        + [f"{counts['ok']} as they should be"]
    )
    say(f"{summary} ({diagnosis.seconds:.1f} s)")


def _line(finding: "Finding") -> None:
    sentences = [f"{finding.check}: {finding.what}", finding.why, finding.mend]
    what, why, mend = (" ".join(text.split()) for text in sentences)
    text = f"{what.rstrip('.')}."
    if why:
        text += f" {why[0].upper()}{why[1:]}."
    if mend:
        # Without a full stop: it is there to be copied.
        text += f" Mend: {mend}"
    if not sys.stdout.isatty():
        print(f"{finding.severity:<8} {text}", flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((f"{finding.severity:<8} ", _STYLES[finding.severity]), text)
    Console().print(line, soft_wrap=True)
