"""Extractions killed by the hundred at random points, and gone on with: what is lost or doubled?

A lane is a process with all imports behind it. It forks one start of an extraction after the
other, kills each where the dice say, looks at what stands, and starts again until the manifest is
published; then comes the next extraction. Workers are fresh processes every time.

The dice are the seed's; where exactly a process is when its kill arrives is the machine's.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kill_dice import Dice
from kill_marks import SUPERVISOR, Board, Order
from kill_run import WORKERS, Kind, Sabotage, Tree, start
from paceline.durable.checksum import crc64
from paceline.durable.errors import PacelineError, StoreFailed
from paceline.durable.fs import PARTIAL
from paceline.durable.journal import fold
from paceline.durable.store import Stat, Store
from paceline.features import manifest as manifests
from seaweed import Seaweed

_PR_SET_PDEATHSIG = 1
_HANGS = 120.0
"""Seconds after which one start counts as stuck."""

_GAVE_UP = 75
"""Exit code of a start that the faulty store ended: to be started again, as a person would."""

_FEW = 12
"""Units that are left of an extraction that is almost done."""

_ALWAYS = ("journal: write", "manifest: rename", "recipe: adopt", "rows: index", "survey: read",
           "stage record: begin", "stage record: finish", "poll")  # fmt: skip
"""Points of every start that comes to its end: where one is missing, marks have come off."""


@dataclass
class Kills:
    """What the kills did."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    """By whom they hit: `supervisor`, `uploader`, `group`, `worker`."""

    phases: Counter[str] = field(default_factory=Counter)
    """By what that one was doing."""

    trees: int = 0
    """Extractions that came to their end."""

    starts: int = 0
    gave_up: int = 0
    """Starts that the faulty store ended."""

    units: int = 0
    """Of those extractions."""

    again: int = 0
    """Units begun once more."""

    findings: list[str] = field(default_factory=list)
    """What should never be; must be empty."""

    seconds: float = 0.0

    def add(self, other: "Kills") -> None:
        for name in ("kills", "phases"):
            getattr(self, name).update(getattr(other, name))
        for name in ("trees", "starts", "gave_up", "units", "again"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.findings += other.findings


def random_kills_of_extractions(
    folder: Path,
    *,
    kills: int,
    seed: int,
    kinds: Sequence[Kind] = ("local", "faulty"),
    units: int = 32,
    sabotage: Sabotage = "",
    s3: Seaweed | None = None,
) -> Kills:
    """Kill `kills` processes over one lane for each of `kinds`, side by side.

    With a sabotaged build the first finding ends a lane. Kind `s3` needs a server, and the
    credentials in the environment.
    """
    began = time.monotonic()
    share, rest = divmod(kills, len(kinds))
    lanes = [
        Lane(
            folder=str(folder / f"lane-{n}"),
            kind=kind,
            seed=f"{seed}/{n}",
            kills=share + (n < rest),
            units=units,
            sabotage=sabotage,
            url=s3.url(f"kills-{seed}-{n}") if s3 and kind == "s3" else "",
            options=dict(s3.options) if s3 and kind == "s3" else {},
        )
        for n, kind in enumerate(kinds)
    ]
    total = Kills(seed)
    with _started(lanes) as processes:
        for lane, process in zip(lanes, processes, strict=True):
            output, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"lane {lane.seed}: exit code {process.returncode}\n{errors}")
            total.add(_decoded(output))
    total.seconds = time.monotonic() - began
    return total


@dataclass(frozen=True)
class Lane:
    """Extractions of one kind, one after the other."""

    folder: str
    kind: Kind
    seed: str
    kills: int
    units: int
    sabotage: Sabotage
    url: str
    options: dict[str, str]


def run_lane(words: str) -> None:
    """A lane's whole life; prints what it found."""
    lane = Lane(**json.loads(words))
    found, dice, number = Kills(0), Dice(lane.seed, lane.kind), 0
    while found.kills.total() < lane.kills and not (lane.sabotage and found.findings):
        tree = Tree(
            folder=Path(lane.folder) / f"tree-{number}",
            kind=lane.kind,
            seed=f"{lane.seed}/{number}",
            units=lane.units,
            url=f"{lane.url}/{number}" if lane.url else "",
            options=lane.options,
            sabotage=lane.sabotage,
        )
        _Extraction(tree, dice, found, lane.kills).run()
        number += 1
    print(json.dumps(vars(found)))


class _Extraction:
    """One tree: started, killed and looked at until it is complete."""

    def __init__(self, tree: Tree, dice: Dice, found: Kills, kills: int) -> None:
        self._tree, self._dice, self._found, self._kills = tree, dice, found, kills
        self._expected = tree.make()
        self._board = Board(tree.board)
        self._life = 0
        self._verified: dict[str, Stat] = {}
        self._known: set[str] = set()
        """Recorded as staged or verified."""
        self._records = 0
        self._has_worked = False
        """Whether the last start added to the journal; not where all had been done before."""

    def run(self) -> None:
        before = len(self._found.findings)
        while True:
            left = self._kills - self._found.kills.total()
            is_almost_done = len(self._verified) + _FEW >= len(self._expected)
            code = self._start(self._dice.orders(left, is_almost_done=is_almost_done))
            if code == 0 or len(self._found.findings) > before:
                break
        if code == 0:
            self._finish()
        if len(self._found.findings) == before:
            self._found.trees += 1
            self._found.units += len(self._expected)
            _remove(self._tree.folder)

    def _start(self, orders: tuple[Order, ...]) -> int | None:
        """One start; its exit code, None where it was killed."""
        tree = self._tree
        self._life += 1
        self._found.starts += 1
        self._board.clear()
        begun_before = tree.begun.stat().st_size
        outside = next((order for order in orders if order.who.startswith("outside")), None)
        pid = _forked(lambda: _live(tree, self._life, orders))
        status = self._wait(pid, outside)
        kills = self._count_kills(outside, status)
        self._look(tree.begun.read_bytes()[begun_before:].split(), status, kills)
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) != signal.SIGKILL or not kills:
                self._says(f"ended by signal {os.WTERMSIG(status)}")
            return None
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, _GAVE_UP):
            self._says(f"exit code {code}: {tree.log.read_text()[-3000:]}")
        self._found.gave_up += code == _GAVE_UP
        return code

    def _wait(self, pid: int, outside: Order | None) -> int:
        """Until it ends; kills it where that is to come from outside. Its status."""
        handle = os.pidfd_open(pid)
        try:
            if outside is not None:
                ended, _, _ = select.select([handle], [], [], outside.delay)
                if not ended and outside.who == "outside group":
                    os.killpg(pid, signal.SIGKILL)
                elif not ended:
                    os.kill(pid, signal.SIGKILL)
            ended, _, _ = select.select([handle], [], [], _HANGS)
            if not ended:
                self._says(f"hangs, at {self._board.read(SUPERVISOR)!r}")
                os.killpg(pid, signal.SIGKILL)
        finally:
            os.close(handle)
        return os.waitpid(pid, 0)[1]

    def _count_kills(self, outside: Order | None, status: int) -> Counter[str]:
        """Orders that were carried out, by whom they hit."""
        kills: Counter[str] = Counter()
        told = [p for p in self._tree.orders.iterdir() if not p.name.startswith("taken-")]
        # An empty one: its process was killed by another order before it could write and kill.
        words = [text.split("\n") for path in told if (text := path.read_text())]
        if all(who == "worker" for who, _ in words):
            is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            if outside is not None and is_killed:
                who = "group" if outside.who == "outside group" else "supervisor"
                words.append([who, self._board.read(SUPERVISOR)])
        for who, phase in words:
            kills[who] += 1
            self._found.phases[_phase_of(who, phase)] += 1
        for path in self._tree.orders.iterdir():
            path.unlink()
        self._found.kills.update(kills)
        return kills

    def _look(self, begun: list[bytes], status: int, kills: Counter[str]) -> None:
        """What stands after a start, against what stood before it."""
        tree, expected = self._tree, self._expected
        if not tree.journal.exists():
            return
        try:
            records = fold(tree.journal.read_bytes(), tree.journal).records
        except PacelineError as error:
            self._says(f"journal: {error}")
            return
        self._has_worked, self._records = len(records) > self._records, len(records)
        of_units = [r for r in records if r["kind"] in ("staged", "verified")]
        verified = [r for r in of_units if r["kind"] == "verified"]
        for key, count in Counter(r["key"] for r in verified).items():
            if count > 1:
                self._says(f"{key}: recorded as verified {count} times")
        now = {r["key"]: Stat(r["size"], int(r["crc64"], 16)) for r in verified}
        for key in self._verified.keys() - now.keys():
            self._says(f"{key}: its record is lost")
        self._judge_objects(now)
        keys = [f"unit-{int(number):06d}.safetensors" for number in begun]
        for key in sorted(set(keys) & self._known):
            self._says(f"{key}: made again, though it was recorded as whole")
        known = {r["key"] for r in of_units}
        lost = len(keys) - len(known - self._known)
        # A worker has one unit at a time; what was made is recorded before it gets the next.
        allowed = kills["worker"] + (WORKERS if os.WIFSIGNALED(status) else 0)
        if lost > allowed:
            self._says(f"{lost} units begun for nothing, at most {allowed} are explained by kills")
        self._found.again += max(0, lost)
        if (tree.run.features / manifests.FILE_NAME).exists() and now != expected:
            self._says(f"a manifest is there, {len(expected) - len(now)} units are not")
        self._verified, self._known = now, known

    def _judge_objects(self, verified: Mapping[str, Stat]) -> None:
        """Verified is whole, and the very bytes that were to be made."""
        for key, stat in verified.items():
            if stat != self._expected[key]:
                self._says(f"{key}: recorded with {stat}, made were {self._expected[key]}")
        for key, found in self._found_in_store(sorted(verified)).items():
            if found != verified[key]:
                self._says(f"{key}: recorded as verified, the store has {found}")

    def _found_in_store(self, keys: Sequence[str]) -> dict[str, Stat | None]:
        """What stands there, by its bytes."""
        tree = self._tree
        if tree.kind != "s3":
            store = tree.truth()
            return {key: store.head(key) for key in keys}
        # The client starts threads, and with those nothing can be forked any more.
        answer = tree.folder / "answer"
        pid = _forked(lambda: answer.write_text(json.dumps(_asked(tree.truth(), keys))))
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError(f"{tree.url}: the store could not be asked")
        told = json.loads(answer.read_text())
        return {key: Stat(*stat) if stat else None for key, stat in told.items()}

    def _finish(self) -> None:
        """Complete: everything is there, once, and nothing else."""
        tree, expected = self._tree, self._expected
        manifest = manifests.load(tree.run.features)
        listed = {unit.key: Stat(unit.size, int(unit.crc64, 16)) for unit in manifest.units}
        if not listed == self._verified == expected:
            self._says("the manifest does not list what was verified")
        for path in tree.folder.rglob(f"*{PARTIAL}"):
            self._says(f"left behind: {path.relative_to(tree.folder)}")
        for place in (tree.staging, tree.run.staging):
            for path in place.rglob("*"):
                self._says(f"left in staging: {path.relative_to(tree.folder)}")
        missing = set(_ALWAYS) - set(tree.passed.read_text().splitlines())
        if missing and self._has_worked:
            self._says(f"points that no kill can be aimed at any more: {sorted(missing)}")
        begun = tree.begun.stat().st_size
        tries = 20
        while (code := self._start(())) == _GAVE_UP and tries:
            tries -= 1
        if code != 0 or tree.begun.stat().st_size != begun:
            self._says(f"a start after the end: exit code {code}, or units were made")

    def _says(self, what: str) -> None:
        self._found.findings.append(f"{self._tree.kind} {self._tree.seed}/{self._life}: {what}")


def _live(tree: Tree, life: int, orders: tuple[Order, ...]) -> None:
    """The forked process: the extraction, and how it ends."""
    log = os.open(tree.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        start(tree, life, orders)
    except StoreFailed as error:
        print(error)
        # A store that fails on purpose may go too far; one that works has no reason to.
        os._exit(_GAVE_UP if tree.kind == "faulty" else 1)


def _asked(store: Store, keys: Sequence[str]) -> dict[str, tuple[int, int] | None]:
    listed = {found.key: found.size for found in store.list("")}
    answers: dict[str, tuple[int, int] | None] = dict.fromkeys(keys)
    for key in keys:
        if key in listed:
            answers[key] = (listed[key], crc64(store.get_range(key, 0, listed[key])))
    return answers


def _forked(work: Callable[[], object]) -> int:
    """Run `work` in a child, leader of its own process group; its number."""
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not go on as its parent would
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _phase_of(who: str, phase: str) -> str:
    place = phase.partition(":")[0] if who in ("supervisor", "group") else phase
    return f"{who}: {place or 'between calls'}"


def _remove(folder: Path) -> None:
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@contextmanager
def _started(lanes: Sequence[Lane]) -> Iterator[list["subprocess.Popen[str]"]]:
    processes = []
    try:
        for lane in lanes:
            Path(lane.folder).mkdir(parents=True)
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        "import sys; from torture_kills import run_lane; run_lane(sys.argv[1])",
                        json.dumps(asdict(lane)),
                    ],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(_paths()),
                        "OMP_NUM_THREADS": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _paths() -> list[str]:
    tests = Path(__file__).resolve().parent
    return [str(tests), str(tests.parent / "src")]


def _decoded(output: str) -> Kills:
    told = json.loads(output)
    return Kills(**{**told, "kills": Counter(told["kills"]), "phases": Counter(told["phases"])})
