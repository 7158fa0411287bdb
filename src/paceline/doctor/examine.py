"""All checks of one recipe at once, none of them longer than its time."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.checks import (
    boot,
    gpus,
    machine,
    mask_token,
    paths,
    recipe_check,
    space,
    staging,
    store,
    template,
    threads,
    vocabulary,
)
from paceline.doctor.findings import Finder, Finding
from paceline.doctor.gpu_probe import GpuProbe, HereProbe
from paceline.doctor.places import Place, places, staging_folders
from paceline.doctor.plan import Plan
from paceline.doctor.touch import touch
from paceline.doctor.world import MaskPreview, World, cores_here
from paceline.durable.limit import Call
from paceline.durable.space import Mount, mount_of
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe

_SECONDS = 10.0


@dataclass(frozen=True)
class Check:
    """One kind of check."""

    name: str
    look: Callable[[World], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    """Beginnings of the roles of places without which it has nothing to look at."""
    patience: int = 1
    """How many times `World.seconds` it may take: it asks several times, or loads libraries."""
    is_heavy: bool = False
    """Whether it loads libraries. Such checks follow each other: two threads must not import the
    same parts of Transformers at a time."""


CHECKS: tuple[Check, ...] = (
    Check("recipe", recipe_check.check),
    Check("paths", paths.check),
    Check("gpus", gpus.check),
    Check("gpus", gpus.check_torch),
    Check("boot", boot.check),
    Check("space", space.check, ("target.path", "run directory", "extract."), 6, is_heavy=True),
    Check("staging", staging.check, ("run directory", "extract.staging")),
    Check("store", store.check, patience=6),
    Check("vocabulary", vocabulary.check, ("target.path",)),
    Check("mask token", mask_token.check, ("target.path", "run directory", "drafter.warm_start")),
    Check("template", template.check, ("target.path", "corpus source"), 6, is_heavy=True),
    Check("threads", threads.check),
    Check("limits", machine.check_limits),
    Check("memory", machine.check_memory),
    Check("clock", machine.check_clock, ("run directory",)),
)


def this_world(
    recipe: Recipe,
    recipe_path: Path,
    run_dir: RunDir,
    *,
    first_row: Callable[[Recipe], MaskPreview],
    plan: Callable[[Recipe, RunDir], Plan],
    seconds: float = _SECONDS,
    gpus: GpuProbe | None = None,
    mounts: Callable[[Path], Mount] = mount_of,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    home: Path | None = None,
) -> World:
    """The recipe on this machine, its paths touched; takes `seconds` where one does not answer."""
    named = [place.path for place in places(recipe, recipe_path, run_dir)]
    return World(
        recipe=recipe,
        recipe_path=recipe_path,
        run_dir=RunDir(run_dir.root.absolute()),
        answers=touch([*named, *staging_folders(recipe, run_dir)], seconds),
        first_row=first_row,
        plan=plan,
        gpus=gpus or HereProbe(),
        mounts=mounts,
        environ=os.environ if environ is None else environ,
        home=home,
        now=time.time(),
        cores=cores_here(root),
        root=root,
        seconds=seconds,
    )


def examine(world: World, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What all checks find, in their order; changes nothing but a store's probe object."""
    heavy = threading.Lock()

    def look(check: Check) -> list[Finding]:
        with heavy if check.is_heavy else contextlib.nullcontext():
            return list(check.look(world))

    begun: list[tuple[Check, Call[list[Finding]] | Finding, float]] = []
    for check in checks:
        missing = _missing(check, world)
        call = missing or Call(lambda check=check: look(check), check.name)
        begun.append((check, call, time.monotonic()))
    findings: list[Finding] = []
    for check, call, start in begun:
        if isinstance(call, Finding):
            findings.append(call)
            continue
        seconds = check.patience * world.seconds
        findings += _result(check, call, start, seconds)
    return findings


def silent_recipe(path: Path) -> Finding:
    """A recipe that does not answer: nothing else can be looked at."""
    return paths.silent(Place("recipe", path, "file"))


def _result(check: Check, call: Call[list[Finding]], start: float, seconds: float) -> list[Finding]:
    find = Finder(check.name)
    try:
        return call.result(start + seconds - time.monotonic())
    except TimeoutError:
        return [
            find.warning(
                f"gave no answer within {seconds:g} s",
                "what it asks, a run would ask too, and wait",
                "findmnt; mount | grep -E 'nfs|fuse'; dmesg | tail",
            )
        ]
    except Exception as error:  # noqa: BLE001  one check that fails must not hide the others
        return [
            find.error(
                f"the check itself failed: {type(error).__name__}: {error}",
                "nothing is known of what it looks at",
                "report it: a fault in Paceline, or in what it runs on",
            )
        ]


def _missing(check: Check, world: World) -> Finding | None:
    """Why a check has nothing to look at; None where it has."""
    for place in world.places:
        if not place.role.startswith(check.needs) or not check.needs:
            continue
        answer = world.answers[place.path]
        if answer.kind == "silent":
            state = "does not answer"
        elif answer.error:
            state = "cannot be read"
        elif answer.kind == "none" and not place.written:
            state = "is not there"
        else:
            continue
        return Finder(check.name).note(f"not looked at: {place.role} {place.path} {state}")
    return None
