"""Services that will take a GPU at the next boot, whether they run now or not."""

from collections.abc import Iterator

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.units import Runner, gpu_units, run_here
from paceline.doctor.world import World, gpu_users

_FIND = Finder("boot")


def check(world: World, run: Runner = run_here) -> Iterator[Finding]:
    """A finding for each of them."""
    units = gpu_units(world.root, world.home, run)
    if units is None:
        yield _FIND.note("services at boot were not looked at: no systemd here")
        return
    wanted = bool(gpu_users(world.recipe))
    for unit in units:
        if unit.run_dir is not None and unit.run_dir == world.run_dir.root.absolute():
            yield _FIND.ok(f"{unit.name} starts this run at boot")
            continue
        state = {True: " and runs now", False: " and does not run now", None: ""}[unit.is_running]
        make = _FIND.warning if wanted else _FIND.note
        yield make(
            f"{unit.name} starts at boot{state}; it {unit.why}",
            "after the next boot it holds GPU memory before this run goes on",
            unit.mend(),
        )
    if not units:
        yield _FIND.ok("no service that is enabled at boot names a GPU or an inference server")
