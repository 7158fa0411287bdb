"""One unit's way to its place, through every crash and every fault: what is never a false "done".

Plain loops with sizes as parameters: the tests run them reduced, `make torture` in full.
"""

import errno
import itertools
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.durable.budget import Budget
from paceline.durable.checksum import crc64
from paceline.durable.crash import Crashed, CrashFs, FaultyFs, Keep, UnsyncedFs, restore
from paceline.durable.depot import Depot, Failed
from paceline.durable.errors import JournalDamaged, PacelineError, StorageRefused, no_room
from paceline.durable.faulty import Fault, FaultyStore, Plan
from paceline.durable.fs import FileSystem
from paceline.durable.journal import Journal, fold
from paceline.durable.local_depot import LocalDepot
from paceline.durable.space import Space
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.staging import Staging
from paceline.durable.store import LocalStore, MemoryStore, Stat, Store, write_verified
from paceline.durable.unit_records import VERIFIED
from paceline.durable.uploader import Uploader

Kind = Literal["local", "staged-local", "staged-memory"]
KINDS: tuple[Kind, ...] = ("local", "staged-local", "staged-memory")

FINGERPRINT = "f00d"
HURRY = 500.0
"""Seconds of the depot's clock in one of ours: its pauses and limits are made for disks."""

ROOMY = Space(total=1 << 40, used=0, free=1 << 40)


def hurried_clock() -> float:
    return time.monotonic() * HURRY


@dataclass(frozen=True)
class Build:
    """The parts under test; a sabotaged build replaces one."""

    local: type[LocalDepot] = LocalDepot
    staged: type[StagedDepot] = StagedDepot
    uploader: type[Uploader] = Uploader
    budget: type[Budget] = Budget
    disk: Callable[[FileSystem], FileSystem] = lambda fs: fs
    """What the program sees of the disk."""


HONEST = Build()


@dataclass
class Site:
    """A run directory, a staging folder and a store below one root."""

    root: Path
    kind: Kind
    units: dict[str, bytes]
    remote: Store | None = None
    """Of `staged-memory`; in the root otherwise."""

    truth: Store | None = None
    """What stands behind a remote that lies; the remote itself otherwise."""

    budget: int = 1 << 20
    uploads: int = 1
    clock: Callable[[], float] = time.monotonic
    patience: float = 60.0
    """Seconds of that clock after which a depot gives up."""

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def journal(self) -> Path:
        return self.run / "journal.jsonl"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    def store(self, fs: FileSystem) -> Store:
        if self.remote is not None:
            return self.remote
        return LocalStore(self.root / "store", fs=fs)

    def staged_bytes(self) -> int:
        """Bytes of all files that wait, those that are being written included."""
        total = 0
        for path in self.staging.rglob("unit*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            total += 0 if path.is_dir() else found.st_size
        return total

    @contextmanager
    def open(
        self, fs: FileSystem, build: Build, news: Callable[[], None]
    ) -> Iterator[tuple[Journal, Depot]]:
        common = {"samples": lambda _: 1, "space_wait": self.patience, "read": lambda _: ROOMY,
                  "clock": self.clock}  # fmt: skip
        with ExitStack() as stack:
            journal = stack.enter_context(Journal(self.journal, fs=fs))
            store = self.store(fs)
            if self.kind == "local":
                assert isinstance(store, LocalStore)
                depot: Depot = build.local(store, journal, FINGERPRINT, fs=fs, **common)
            else:
                uploader = build.uploader(
                    store, concurrency=self.uploads, wake=news, give_up=0.1, first_pause=0.002
                )
                stack.callback(uploader.close)
                staging = Staging(self.staging, self.run, fs=fs)
                stack.callback(staging.close)
                budget = build.budget(self.budget)
                depot = build.staged(store, staging, journal, FINGERPRINT, budget, uploader,
                                     hung_after=self.patience, **common)  # fmt: skip
            stack.callback(depot.close)
            yield journal, depot


def small_units(count: int = 1, size: int = 5000) -> dict[str, bytes]:
    return {
        f"unit-{n:06d}.safetensors": bytes((n + i * 7) % 251 for i in range(size + n))
        for n in range(count)
    }


def done_units(site: Site, fs: FileSystem) -> dict[str, Stat]:
    """A simple survey: the last record says verified, and the bytes agree."""
    store = site.truth or site.store(fs)
    return {key: stat for key, stat in _said_done(site).items() if store.head(key) == stat}


def false_dones(site: Site) -> list[str]:
    """Units that the journal calls verified and that are not whole at their place.

    A journal that is refused as damaged is one too: a crash never damages it.
    """
    try:
        said = _said_done(site)
    except JournalDamaged as error:
        return [str(error)]
    store = site.truth or site.store(UnsyncedFs())
    return [
        f"{key}: recorded as verified, found {store.head(key)}"
        for key, stat in said.items()
        if store.head(key) != stat or store.head(key) != _stat(site.units[key])
    ]


def commit(site: Site, fs: FileSystem, build: Build = HONEST) -> list[str]:
    """Make the units that are not done, one after the other; returns what was recovered.

    Raises what a stage would end with: OSError, StorageRefused, IntegrityError.
    """
    news = threading.Event()
    seen = build.disk(fs)
    with site.open(seen, build, news.set) as (_, depot):
        verified = set(done_units(site, fs))
        todo = deque(k for k in site.units if k not in verified and k not in depot.recovered)
        tries: Counter[str] = Counter()
        while len(verified) < len(site.units):
            if reason := depot.overdue():
                raise StorageRefused(reason)
            if todo and depot.admit(todo[0], len(site.units[todo[0]])) is None:
                key = todo.popleft()
                try:
                    stat = write_verified(depot.place(key), [site.units[key]], fs=seen)
                except OSError as error:
                    tries[key] += 1
                    if no_room(error) is not None:
                        depot.refused(key, error)
                    else:
                        depot.abandon(key)
                        if tries[key] > 3:
                            raise
                    todo.append(key)
                else:
                    depot.made(key, stat)
            else:
                news.wait(0.002)
                news.clear()
            if isinstance(fs, CrashFs) and fs.has_crashed:
                raise Crashed
            for end in depot.poll():
                if isinstance(end, Failed):
                    tries[end.key] += 1
                    if tries[end.key] > 3:
                        raise end.error
                    todo.append(end.key)
                else:
                    verified.add(end.key)
        return list(depot.recovered)


@dataclass
class Findings:
    """What a loop saw."""

    calls: dict[str, int] = field(default_factory=dict)
    """Calls of one commit that change the disk, by kind."""

    cases: int = 0
    false_dones: list[str] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)
    """Errors that say nothing, and fresh runs that did not complete."""

    outcomes: Counter[str] = field(default_factory=Counter)


def crash_everywhere(
    folder: Path,
    *,
    kinds: Sequence[Kind] = KINDS,
    keeps: Sequence[Keep] = ("none", "all", 1, 2, 3),
    build: Build = HONEST,
    units: dict[str, bytes] | None = None,
    begin: int = 0,
    stride: int = 1,
    is_enough: bool = False,
) -> Findings:
    """Crash after every `stride`-th call of a commit, leave each of `keeps`, look, and go on.

    Before call `begin` nothing is crashed. With `is_enough` the first false "done" ends the loop.
    """
    findings = Findings()
    for kind in kinds:
        for k in itertools.count(begin, stride):
            site = _fresh(folder, kind, units)
            fs = CrashFs(folder, crash_after=k)
            with suppress(Crashed):
                commit(site, fs, build)
            if not fs.has_crashed:
                findings.calls[kind] = fs.calls
                break
            call = fs.trace[-1] if k else "none"
            disks = {keep: fs.disk(keep) for keep in keeps}
            remote = site.remote
            for keep, disk in disks.items():
                where = f"{kind}, crash after call {k} ({call}), unsynced effects: {keep}"
                shutil.rmtree(folder)
                restore(disk, folder)
                site.remote = _copy(remote)
                _go_on(site, where, findings)
                if findings.false_dones and is_enough:
                    return findings
    return findings


def fail_everywhere(
    folder: Path,
    *,
    kinds: Sequence[Kind] = KINDS,
    errors: Sequence[int] = (errno.EIO, errno.ENOSPC),
    modes: Sequence[str] = ("once", "forever", "block"),
    stride: int = 1,
) -> Findings:
    """Fail every `stride`-th call of a commit in each way, look, and go on with a sound disk."""
    findings = Findings()
    for kind in kinds:
        counting = FaultyFs(UnsyncedFs(), fail_at=0, error=errno.EIO)
        commit(_fresh(folder, kind, None), counting)
        findings.calls[kind] = counting.calls
        for mode in modes:
            for error in errors if mode != "block" else errors[:1]:
                for k in range(1, counting.calls + 1, stride):
                    site = _hurried(_fresh(folder, kind, None))
                    fs = FaultyFs(UnsyncedFs(), fail_at=k, error=error,
                                  forever=mode == "forever", block=mode == "block")  # fmt: skip
                    where = f"{kind}, call {k} fails {mode} with {errno.errorcode[error]}"
                    _faulty_commit(site, fs, where, findings)
                    _go_on(site, where, findings)
    return findings


def store_faults(
    folder: Path,
    *,
    seed: int,
    faults: Mapping[Fault, float] | Plan,
    units: int = 20,
    build: Build = HONEST,
) -> Findings:
    """Commit units to a store with faults, starting again whenever it gives up."""
    findings = Findings()
    site = _fresh(folder, "staged-memory", small_units(units))
    assert site.remote is not None
    site.truth, site.uploads = site.remote, 3
    site.remote = FaultyStore(site.truth, seed=seed, faults=faults, stall_seconds=0.01)
    for _ in range(50):
        try:
            commit(_hurried(site), UnsyncedFs(), build)
            outcome = "success"
        except (OSError, PacelineError) as error:
            outcome = type(error).__name__
        findings.outcomes[outcome] += 1
        findings.false_dones += false_dones(site)
        if outcome == "success":
            break
    site.remote = site.truth
    _go_on(site, f"seed {seed}", findings)
    return findings


@dataclass(frozen=True)
class BackPressure:
    """How a slow store and a fast producer got along."""

    peak: int
    """Most bytes seen in staging."""

    held_peak: int
    """Most bytes that the budget held."""

    seconds: float
    ideal: float
    """Seconds that the store's link alone takes."""

    stalled: float
    advice: list[str]
    false_dones: list[str]


def back_pressure(
    folder: Path,
    *,
    budget: int,
    unit_bytes: int,
    units: int,
    bytes_per_second: float,
    uploads: int = 2,
    producers: int = 2,
    build: Build = HONEST,
    fs: FileSystem | None = None,
) -> BackPressure:
    """Produce ten times as fast as a store takes `bytes_per_second` away."""
    fs = fs or UnsyncedFs()
    data = bytes(unit_bytes)
    keys = [f"unit-{n:06d}.safetensors" for n in range(units)]
    remote = FaultyStore(MemoryStore(), bytes_per_second=bytes_per_second)
    everything = dict.fromkeys(keys, data)
    site = Site(folder, "staged-memory", everything, remote, budget=budget, uploads=uploads)
    every = unit_bytes / bytes_per_second / 10 * producers

    def make(path: Path) -> Stat:
        began = time.monotonic()
        stat = write_verified(path, [data], fs=fs)
        time.sleep(max(0.0, every - (time.monotonic() - began)))
        return stat

    news = threading.Event()
    todo, verified = deque(keys), 0
    peak = 0
    work: dict[Future[Stat], str] = {}
    began = time.monotonic()
    with site.open(fs, build, news.set) as (_, depot), ThreadPoolExecutor(producers) as pool:
        while verified < units:
            if reason := depot.overdue():
                raise StorageRefused(reason)
            while todo and len(work) < producers and depot.admit(todo[0], unit_bytes) is None:
                key = todo.popleft()
                work[pool.submit(make, depot.place(key))] = key
            if work and todo:
                wait(work, 0.002, FIRST_COMPLETED)
            else:
                news.wait(0.005)
            news.clear()
            for future in [f for f in work if f.done()]:
                depot.made(work.pop(future), future.result())
            peak = max(peak, site.staged_bytes())
            for end in depot.poll():
                assert not isinstance(end, Failed), end
                verified += 1
        seconds = time.monotonic() - began
        meters = depot.meters()
        assert isinstance(depot, StagedDepot)
        held = depot._budget.peak
        advice = depot.suggest(seconds)
    return BackPressure(
        peak,
        held,
        seconds,
        units * unit_bytes / bytes_per_second,
        meters.stall_seconds.get("budget", 0.0),
        advice,
        false_dones(site),
    )


# ---- sabotaged builds: each must be found by the loop that can see it


class NoSync:
    """A disk whose program forgets to sync files."""

    def __init__(self, inner: FileSystem) -> None:
        self._inner = inner

    def sync(self, file) -> None:
        file.flush()

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


class NoFolderSync(NoSync):
    """A disk whose program forgets to sync folders."""

    def sync(self, file) -> None:
        self._inner.sync(file)

    def sync_dir(self, path) -> None:
        pass


class HastyStagedDepot(StagedDepot):
    """Records a unit as verified when it is handed to the uploader."""

    def _submit(self, key, path, stat, *, may_be_there=False):
        self._records.add("verified", key, stat, lambda: None)
        super()._submit(key, path, stat, may_be_there=may_be_there)


def hasty_local_depot(units: dict[str, bytes]) -> type[LocalDepot]:
    """Records a unit as verified before its file has its name."""

    class HastyLocalDepot(LocalDepot):
        def admit(self, key, num_bytes):
            why = super().admit(key, num_bytes)
            if why is None:
                self._records.add("verified", key, _stat(units[key]), lambda: None)
            return why

    return HastyLocalDepot


class BlindUploader(Uploader):
    """Believes the store's answer."""

    def _verify(self, key, stat):
        pass


class UnboundedBudget(Budget):
    """Reserves nothing."""

    def try_reserve(self, owner, size):
        self.adopt(owner, size)
        return True


def _faulty_commit(site: Site, fs: FaultyFs, where: str, findings: Findings) -> None:
    outcome: list[str] = []

    def run() -> None:
        try:
            commit(site, fs)
            outcome.append("success")
        except (OSError, PacelineError) as error:
            outcome.append(type(error).__name__)
            if not str(error):
                findings.unclean.append(f"{where}: an error without words, {error!r}")
        except BaseException as error:  # noqa: BLE001 - a finding
            outcome.append(type(error).__name__)
            findings.unclean.append(f"{where}: {error!r}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + 20.0
    while thread.is_alive() and time.monotonic() < end and not fs.is_blocked.is_set():
        thread.join(0.002)
    # Where a thread of the pool hangs, the one that leads has to go on, and to give up.
    thread.join(0.0 if fs.blocked_in == thread.name else 20.0)
    findings.outcomes["hangs" if thread.is_alive() else outcome[0]] += 1
    findings.false_dones += [f"{where}: {found}" for found in false_dones(site)]
    fs.release()
    thread.join(20.0)
    if thread.is_alive():
        findings.unclean.append(f"{where}: did not end")


def _go_on(site: Site, where: str, findings: Findings) -> None:
    """Look at what stands, and complete it with a sound disk."""
    findings.cases += 1
    site = replace(site, clock=time.monotonic, patience=60.0)
    findings.false_dones += [f"{where}: {found}" for found in false_dones(site)]
    try:
        recovered = commit(site, UnsyncedFs())
    except BaseException as error:  # noqa: BLE001 - a finding
        findings.unclean.append(f"{where}: a fresh run ended with {error!r}")
        return
    findings.outcomes["recovered"] += len(recovered)
    missing = set(site.units) - set(done_units(site, UnsyncedFs()))
    left = sorted(p.name for p in site.staging.rglob("*"))
    if missing or left:
        findings.unclean.append(f"{where}: a fresh run left out {missing}, left behind {left}")
    findings.false_dones += [f"{where}, gone on with: {found}" for found in false_dones(site)]


def _fresh(folder: Path, kind: Kind, units: dict[str, bytes] | None) -> Site:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    remote = MemoryStore() if kind == "staged-memory" else None
    return Site(folder, kind, units or small_units(), remote)


def _hurried(site: Site) -> Site:
    """One whose depot gives up after 20 ms: right where something is going to hang."""
    return replace(site, clock=hurried_clock, patience=10.0)


def _copy(store: Store | None) -> Store | None:
    if store is None:
        return None
    copy = MemoryStore()
    for found in store.list(""):
        copy.put(found.key, store.get_range(found.key, 0, found.size))
    return copy


def _said_done(site: Site) -> dict[str, Stat]:
    if not site.journal.exists():
        return {}
    last = {
        record["key"]: record
        for record in fold(site.journal.read_bytes(), site.journal).records
        if "key" in record
    }
    return {
        key: Stat(record["size"], int(record["crc64"], 16))
        for key, record in last.items()
        if record["kind"] == VERIFIED
    }


def _stat(data: bytes) -> Stat:
    return Stat(len(data), crc64(data))
