"""GPUs: are they there, can torch use them, and who holds their memory."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.gpu_probe import Gpu, GpuHolder, GpuView
from paceline.doctor.plan_target import read_target
from paceline.doctor.processes import Owner, ancestors, owner_of
from paceline.doctor.world import World, gpu_users
from paceline.durable.amounts import size_text
from paceline.durable.errors import PacelineError
from paceline.durable.owner import read_owner
from paceline.watch.words import counted

_FIND = Finder("gpus")
_UNLISTED = 1 << 30
"""Bytes in use beyond those of the holders that are the driver's own at most."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check(world: World) -> Iterator[Finding]:
    """Devices that are named and not there, and what holds the memory of those that are."""
    view = world.gpus.look()
    users = gpu_users(world.recipe)
    if view.trouble:
        if users:
            yield _FIND.error(
                f"{view.trouble}, and {_keys(users)} ask for a GPU",
                "the stages that use it would fail",
                "install the NVIDIA driver, start the container with --gpus all, or "
                + _on_cpu(users),
            )
        else:
            yield _FIND.note(f"GPUs were not looked at: {view.trouble}; the recipe uses none")
        return
    yield from _missing(view, users, world)
    need = _need(world)
    for gpu in view.gpus:
        findings = [*_held(world, view, gpu, users.get(gpu.index, []), need)]
        yield from findings
        if not findings:
            yield _FIND.ok(f"GPU {gpu.index} ({gpu.name}): {size_text(gpu.total - gpu.used)} free")
        if gpu.index in users and gpu.persistence is not True:
            state = "off" if gpu.persistence is False else "unknown"
            yield _FIND.note(
                f"GPU {gpu.index}: persistence mode is {state}",
                "without it each first use of an idle GPU loads the driver's state anew, seconds",
                "sudo systemctl enable --now nvidia-persistenced",
            )


def check_torch(world: World) -> Iterator[Finding]:
    """Whether the torch that is installed can use a GPU at all; read, not imported."""
    users = gpu_users(world.recipe)
    if not users:
        return
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return
    if re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE):
        version = re.search(r"^__version__\s*=\s*'([^']*)'", text, re.MULTILINE)
        yield _FIND.error(
            f"torch {version[1] if version else ''} was built without CUDA, and {_keys(users)} ask "
            "for it",
            "the stages that use a GPU would fail",
            "pip install --force-reinstall torch, from an index with CUDA builds",
        )


def _missing(view: GpuView, users: dict[int, list[str]], world: World) -> Iterator[Finding]:
    visible = world.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(view.gpus)
    if visible is not None and users:
        yield _FIND.note(
            f"CUDA_VISIBLE_DEVICES is {visible!r}",
            "`cuda:0` is the first GPU named there, and GPUs that are not named there are hidden",
            "unset CUDA_VISIBLE_DEVICES",
        )
        count = min(count, len([part for part in visible.split(",") if part.strip()]))
    for number, keys in sorted(users.items()):
        if number >= count:
            yield _FIND.error(
                f"{', '.join(keys)}: GPU {number} is not there; {counted(count, 'GPU')} can be "
                "used",
                "the stages that use it would fail",
                f"--set {keys[0]}={_instead(keys[0], count)}",
            )


def _held(
    world: World, view: GpuView, gpu: Gpu, keys: list[str], need: int | None
) -> Iterator[Finding]:
    """One finding for each holder of a GPU, and for memory that nobody is named for."""
    of_gpu = [holder for holder in view.holders if holder.gpu == gpu.index]
    free = gpu.total - gpu.used
    is_short = bool(keys) and need is not None and free < need
    why = "it is not there for this run"
    if is_short and need is not None:
        why = f"the target alone takes {size_text(need)}, and {size_text(free)} are free"
    make = _FIND.error if is_short else _FIND.warning if keys else _FIND.note
    if not keys:
        why = "this recipe uses another device"
    for holder in of_gpu:
        owner = owner_of(holder.pid, world.root, holds_gpu=True)
        held = f"GPU {gpu.index}: {_amount(holder, gpu)} held by {owner.in_words()}"
        if _is_own(owner, world):
            yield _FIND.note(f"{held}: this run itself is at work")
        else:
            yield make(held, why, owner.mend())
    unlisted = gpu.used - sum(holder.used or 0 for holder in of_gpu)
    if unlisted > _UNLISTED and all(holder.used is not None for holder in of_gpu):
        yield make(
            f"GPU {gpu.index}: {size_text(unlisted)} of {size_text(gpu.total)} are in use by no "
            "process that the driver names here: one outside this container, or one that died",
            why,
            f"on the machine itself: sudo fuser -v /dev/nvidia{gpu.index}",
        )


def _amount(holder: GpuHolder, gpu: Gpu) -> str:
    if holder.used is None:
        return f"some of {size_text(gpu.used)} in use are"
    return f"{size_text(holder.used)} of {size_text(gpu.total)} are"


def _is_own(owner: Owner, world: World) -> bool:
    """Whether it is the command at work in this run directory, or a worker of it."""
    if owner.where != "here" or not world.answers_at(world.run_dir.root.absolute()):
        return False
    at_work = read_owner(world.run_dir.root)
    return at_work is not None and at_work.pid in ancestors(owner.pid, world.root)


def _need(world: World) -> int | None:
    """Bytes of the target's weights on a device; None where they are not known."""
    path = Path(world.recipe.target.path)
    if not world.answers_at(path):
        return None
    try:
        weights = read_target(path).weights
    except (PacelineError, OSError):
        return None
    return None if weights is None else weights * _BYTES[world.recipe.target.dtype]


def _keys(users: dict[int, list[str]]) -> str:
    return " and ".join(dict.fromkeys(key for keys in users.values() for key in keys))


def _on_cpu(users: dict[int, list[str]]) -> str:
    """Overrides that use no GPU."""
    keys = dict.fromkeys(key for of_gpu in users.values() for key in of_gpu)
    return " ".join(f"--set {key}={_cpu(key)}" for key in keys)


def _cpu(key: str) -> str:
    if key == "target.devices":
        return "[]"
    return "[cpu:0]" if key.endswith("_devices") else "cpu"


def _instead(key: str, count: int) -> str:
    if key == "target.devices":
        return f"'{list(range(count))}'"
    if not count:
        return _cpu(key)
    return "[cuda:0]" if key.endswith("_devices") else "cuda:0"
