"""What the checks look at: the recipe, its paths, and the machine they lie on."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.doctor.gpu_probe import GpuProbe
from paceline.doctor.places import Place, places
from paceline.doctor.plan import Plan
from paceline.doctor.touch import Answer
from paceline.durable.space import Mount
from paceline.recipe.online import is_on_cpu
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class MaskPreview:
    """The first row of the data as the target sees it, or why there is none."""

    source: str
    """Name of the data set."""
    row: int = 0
    """Number of the row that is shown, from 1; 0 where none of those looked at can be used."""
    text: str = ""
    """Rendered; what is trained on stands between ⟦ and ⟧."""
    tokens: int = 0
    trained: int = 0
    """Of the tokens."""
    is_prompt: bool = False
    """Whether the target answers it itself, so that nothing is marked yet."""
    rejected: tuple[str, ...] = ()
    """Why rows before it cannot be used, a reason each."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One recipe on one machine; the same values always give the same findings."""

    recipe: Recipe
    recipe_path: Path
    run_dir: RunDir
    answers: Mapping[Path, Answer]
    """What each path said when it was touched."""
    first_row: Callable[[Recipe], MaskPreview]
    """Renders the first row of the data. Raises TargetError, DataError, RecipeError."""
    plan: Callable[[Recipe, RunDir], Plan]
    """What `paceline plan` would say, without probing the store. Raises PacelineError."""
    gpus: GpuProbe
    mounts: Callable[[Path], Mount]
    """The mount that a path lies on; raises OSError where nobody knows."""
    environ: Mapping[str, str]
    """The environment of the command."""
    home: Path | None
    """The user's folder."""
    now: float
    """Seconds since the epoch."""
    cores: int
    """CPU cores that this process may use."""
    root: Path = field(default=Path("/"))
    """Where `proc/`, `sys/`, `etc/` and `run/` lie."""
    seconds: float = 10.0
    """How long one check may take."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The recipe's paths."""
        return places(self.recipe, self.recipe_path, self.run_dir)

    def answers_at(self, path: Path) -> bool:
        """Whether a path answered when it was touched, and is readable; it may not exist."""
        answer = self.answers.get(path)
        return answer is not None and answer.kind != "silent" and not answer.error


def gpu_users(recipe: Recipe) -> dict[int, list[str]]:
    """The recipe's keys by the number of the GPU that they name."""
    users: dict[int, list[str]] = {}
    target = recipe.target
    if target.devices:
        for number in target.devices:
            users.setdefault(number, []).append("target.devices")
    train = recipe.train
    targets, drafters = train.target_devices if train.online else (), train.drafter_devices
    for key, device in (
        # With `devices` the other stages of the target still run on `device`.
        ("target.device", target.device),
        *(("train.target_devices", device) for device in targets),
        *(("train.drafter_devices", device) for device in drafters),
        *(() if drafters else (("train.device", train.device),)),
    ):
        if not is_on_cpu(device):
            users.setdefault(int(device.partition(":")[2] or 0), []).append(key)
    return users


def cores_here(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: of the machine, or what its container is given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    group = root / "sys/fs/cgroup"
    try:
        quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):
        try:
            quota = int((group / "cpu/cpu.cfs_quota_us").read_text())
            period = int((group / "cpu/cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            return cores or 1
    return max(1, min(cores or 1, -(-quota // period))) if quota > 0 and period > 0 else cores or 1
