"""Room on disks and in memory against what the plan needs."""

from collections.abc import Iterator

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.plan import Verdict
from paceline.doctor.world import World
from paceline.durable.amounts import size_text
from paceline.durable.errors import PacelineError
from paceline.watch.words import command_line

_FIND = Finder("space")


def check(world: World) -> Iterator[Finding]:
    """A finding for each thing that has to fit somewhere, as `paceline plan` has it."""
    command = command_line("paceline", "plan", world.recipe_path)
    try:
        plan = world.plan(world.recipe, world.run_dir)
    except (PacelineError, OSError) as error:
        yield _FIND.note(f"not compared with a plan: {error}", "", command)
        return
    for verdict in plan.verdicts:
        yield _judged(verdict, command)


def _judged(verdict: Verdict, command: str) -> Finding:
    has = "?" if verdict.has is None else size_text(verdict.has)
    what = f"{verdict.name}: {size_text(verdict.needs)} needed, {has} there"
    if verdict.said:
        what += f" ({verdict.said.rstrip('.')})"
    if verdict.fits is None:
        return _FIND.note(f"{what}; whether it fits is not known", "", command)
    if verdict.fits:
        return _FIND.ok(what)
    mend = "; or ".join(verdict.advice) or command
    return _FIND.error(what, "the run would stop when it is full", mend)
