"""A recipe on a machine that a test describes, for the checks of `paceline doctor`."""

from pathlib import Path
from typing import Any

from paceline.doctor.examine import this_world
from paceline.doctor.findings import Finding, Severity
from paceline.doctor.gpu_probe import Gpu, GpuHolder, GpuView
from paceline.doctor.plan import Plan
from paceline.doctor.world import MaskPreview, World
from paceline.durable.errors import UserError
from paceline.durable.space import Mount
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe

GIB = 1 << 30


class RecordedGpus:
    """What a probe said once."""

    def __init__(self, *holders: GpuHolder, used: int = 0, count: int = 1, trouble: str = ""):
        gpus = tuple(
            Gpu(
                index=i, name="NVIDIA H200", total=140 * GIB, used=used if i == 0 else 0,
                persistence=True,
            )
            for i in range(count)
        )  # fmt: skip
        self._view = GpuView(gpus=() if trouble else gpus, holders=holders, trouble=trouble)

    def look(self) -> GpuView:
        return self._view


def world_of(path: Path, *overrides: str, **given: Any) -> World:
    """The recipe file `path` with overrides; a lasting disk and no GPU unless `given`."""
    changes = {k: given.pop(k) for k in ("cores", "now") if k in given}
    world = this_world(
        load_recipe(path, overrides),
        path,
        RunDir(given.pop("run", path.parent / "run")),
        **{
            "first_row": no_rows,
            "plan": no_plan,
            "gpus": RecordedGpus(trouble="no driver"),
            "mounts": lasting,
            "environ": {},
            **given,
        },
    )
    return World(**{**vars(world), **changes})


def lasting(path: Path) -> Mount:
    return Mount("/dev/sda1", Path("/"), "ext4")


def no_rows(recipe: Recipe) -> MaskPreview:
    raise UserError("not rendered here")


def no_plan(recipe: Recipe, run_dir: RunDir) -> Plan:
    raise UserError("not planned here")


def worst(findings: Any) -> Severity:
    """The worst severity among the findings of a check."""
    order = list(Severity)
    return min((f.severity for f in findings), key=order.index)


def only(findings: Any, severity: str) -> list[Finding]:
    return [f for f in findings if f.severity == severity]


def fake_process(
    root: Path,
    pid: int,
    *,
    command: str = "vllm serve model",
    cgroup: str = "/system.slice/vllm.service",
    uid: int = 0,
    parent: int = 1,
    has_gpu: bool = True,
) -> None:
    """A process in `root`/proc."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join(command.split()).encode() + b"\0")
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (folder / "status").write_text(
        f"Name:\t{command.split()[0]}\nPPid:\t{parent}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"
    )
    (folder / "fd/3").symlink_to("/dev/nvidia0" if has_gpu else "/dev/null")


def fake_machine(root: Path, *, is_container: bool = False) -> Path:
    """`root`/proc of a machine, or of a container on one."""
    namespace = root / "proc/self/ns"
    namespace.mkdir(parents=True)
    (namespace / "pid").symlink_to("pid:[4026532000]" if is_container else "pid:[4026531836]")
    return root


def unit(root: Path, name: str, text: str, *, folder: str = "usr/lib/systemd/system") -> None:
    """A service that is enabled at boot, as `systemctl enable` leaves it."""
    file = root / folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / name).symlink_to(Path("/") / folder / name)
