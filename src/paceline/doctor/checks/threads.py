"""Threads against cores, and the type of numbers against the CPU."""

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.world import World
from paceline.recipe.online import capture_devices, is_on_cpu, training_devices
from paceline.recipe.schema import Recipe
from paceline.watch.words import counted

_FIND = Finder("threads")
_FAST = frozenset({"avx512f", "amx_bf16", "bf16", "asimdhp"})
"""Flags of CPUs, x86 and Arm, that multiply 16-bit numbers without converting each."""


def check(world: World) -> Iterator[Finding]:
    """Workers times threads against cores, OpenMP's settings, and the type on a CPU."""
    recipe, cores = world.recipe, world.cores
    workers = len(recipe.target.devices) or recipe.target.workers
    asked = f"{counted(workers, 'worker')} × {counted(recipe.target.threads, 'thread')}"
    findings = [*_too_many(world, workers, asked)]
    yield from findings
    if not findings:
        yield _FIND.ok(f"{asked}, {recipe.train.threads} to train, on {counted(cores, 'core')}")
    if world.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        yield _FIND.warning(
            "OMP_WAIT_POLICY is active",
            "threads that wait spin, and take the cores from the other workers",
            "unset OMP_WAIT_POLICY",
        )
    omp = world.environ.get("OMP_NUM_THREADS", "")
    if omp.isdecimal() and int(omp) > cores:
        yield _FIND.warning(
            f"OMP_NUM_THREADS is {omp}, on {counted(cores, 'core')}",
            "this process starts more threads than can run",
            "unset OMP_NUM_THREADS",
        )
    yield from _types(world)


def _too_many(world: World, workers: int, asked: str) -> Iterator[Finding]:
    recipe, cores = world.recipe, world.cores
    why = "threads that wait for each other make it slower than fewer would be"
    if workers * recipe.target.threads > cores:
        threads = max(1, cores // workers)
        mends = [f"--set target.threads={threads}"] if threads < recipe.target.threads else []
        if workers > cores:
            devices = f"target.devices={list(recipe.target.devices[:cores])}".replace(" ", "")
            mends.append(f"--set {devices if recipe.target.devices else f'target.workers={cores}'}")
        yield _FIND.warning(f"{asked} (target) on {counted(cores, 'core')}", why, " ".join(mends))
    at_once = _training_threads(recipe)
    if at_once > max(cores, recipe.train.threads):
        devices = [*capture_devices(recipe), *training_devices(recipe.train)]
        yield _FIND.warning(
            f"training: {at_once} threads at once, of {counted(len(devices), 'process')}, on "
            f"{counted(cores, 'core')}",
            why,
            "--set train.threads=1 --set target.threads=1",
        )
    if recipe.train.threads > cores:
        yield _FIND.warning(
            f"train.threads: {recipe.train.threads} on {counted(cores, 'core')}",
            why,
            f"--set train.threads={cores}",
        )


def _training_threads(recipe: Recipe) -> int:
    """Of all processes that an online training, or several drafters, have on CPUs."""
    targets = sum(map(is_on_cpu, capture_devices(recipe)))
    drafters = sum(map(is_on_cpu, training_devices(recipe.train)))
    return targets * recipe.target.threads + drafters * recipe.train.threads


def _types(world: World) -> Iterator[Finding]:
    recipe = world.recipe
    slow: list[tuple[str, str]] = []
    target_on_cpu = recipe.target.device == "cpu" and not recipe.target.devices
    if target_on_cpu and recipe.target.dtype != "float32":
        slow.append(("target.dtype", recipe.target.dtype))
    if recipe.train.compute == "bfloat16" and any(map(is_on_cpu, training_devices(recipe.train))):
        slow.append(("train.compute", "bfloat16"))
    flags = _cpu_flags(world.root)
    if flags is None or flags & _FAST:
        return
    for key, kind in slow:
        yield _FIND.warning(
            f"{key}: {kind} on a CPU without AVX512",
            "it is 5-9 times slower there than float32",
            f"--set {key}=float32",
        )


def _cpu_flags(root: Path) -> set[str] | None:
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return None if found is None else set(found[1].split())
