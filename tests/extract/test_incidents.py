"""The incidents that this project exists for, as far as the extraction goes, each replayed.

They run `stage.run` or the command line over a tiny target, with real disks that fill up or
freeze, a real S3 server, and real signals.
"""

import dataclasses
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from extract_runs import contents, make_run, make_sample, make_samples
from extract_standins import POISON, open_poisoned, open_reader
from extract_trials import (
    bucket_of,
    bytes_below,
    events_of,
    objects,
    times_recorded,
    with_extract,
)
from fault_proxy import answer, fault_proxy
from frozen_mounts import frozen
from paceline.cli.main import main
from paceline.durable.errors import (
    RecipeError,
    StorageRefused,
    TargetError,
    UserError,
)
from paceline.durable.journal import Journal
from paceline.durable.staging import Staging, staging_root
from paceline.extract import ledger, making, stage, telling, watching, work
from paceline.extract.ledger import verified_record
from paceline.features.plan import Unit
from paceline.features.reader import FeatureReader
from paceline.features.shard import Shard, write_shard
from paceline.flow.units import Policy
from paceline.flow.waker import Waker
from paceline.recipe.run_dir import RunDir
from paceline.status import run_status
from paceline.status_parts import Extraction
from paceline.target.load import Target
from paceline.types import Split
from run_server import wait_until
from small_disks import small_disk
from tiny_models import tiny_model


class Command(threading.Thread):
    """A command line in this process, beside the test."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(daemon=True)
        self._arguments = arguments
        self.code: int | None = None
        self.start()

    def run(self) -> None:
        self.code = main(self._arguments)

    def wait_for(self, condition, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.is_alive(), f"it ended before, with {self.code}"
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def impatient(monkeypatch):
    """Calls count as stuck after a second."""
    for module in (work, watching):
        monkeypatch.setattr(module, "Policy", partial(Policy, stuck_after=1.0))


def extraction(run_dir):
    """What `status` says of the stage."""
    return next(s for s in run_status(run_dir.root).stages if s.name == "extract")


def now(run_dir):
    """Workers, waits and calls that hang, as far as they are told by now."""
    return extraction(run_dir).extraction or Extraction()


def said_by_status(run_dir, capsys):
    capsys.readouterr()
    started = time.monotonic()
    code = main(["status", str(run_dir.root)])
    assert time.monotonic() - started < 5
    return code, re.sub(r"\s+", " ", capsys.readouterr().out)


# Frozen storage


@pytest.mark.parametrize("where", ["the store", "a link in the run"])
def test_incident_storage_freezes(tmp_path, prepared, impatient, monkeypatch, capsys, where):
    """I/O neither fails nor returns: `status` soon names call, path, since when and state D."""
    place = tmp_path / "mount"
    place.mkdir()
    is_link = where == "a link in the run"
    run_dir, command = prepared.copy(tmp_path / "run", store="" if is_link else str(place))
    if is_link:
        run_dir.features.symlink_to(place)
        monkeypatch.setattr("paceline.status._FOLDER_SECONDS", 0.5)
    original = work.Progress.add
    with ExitStack() as freeze:

        def freezing(self, index, times):
            original(self, index, times)
            if index == 5:
                freeze.enter_context(frozen(place if is_link else next(place.iterdir())))

        monkeypatch.setattr(work.Progress, "add", freezing)
        running = Command(*command)
        running.wait_for(lambda: events_of(run_dir, "stuck"))
        (told,) = events_of(run_dir, "stuck")
        assert told["worker"] is None
        assert told["worker_pid"] == os.getpid()
        assert told["path"].startswith(str(run_dir.features if is_link else place))
        assert told["process_state"] == "D"
        running.wait_for(lambda: now(run_dir).stuck)
        code, said = said_by_status(run_dir, capsys)
        assert code == 0
        assert re.search(rf"{told['call']} {told['path']} has not returned for [0-9.]+s", said)
        assert "(process state D)" in said
    running.join(30)
    # The mount has broken off, as a lost server's does in the end.
    assert running.code == 1
    assert "Look at the disk or the mount" in capsys.readouterr().err
    monkeypatch.undo()
    verified = times_recorded(run_dir, "verified")
    assert main(command) == 0
    assert set(times_recorded(run_dir, "verified").values()) == {1}
    assert len(verified) >= 6


def test_incident_storage_is_frozen_when_the_run_goes_on(
    tmp_path, prepared, impatient, monkeypatch, capsys
):
    """Also while a start looks at what is there, the call that hangs is named."""
    place = tmp_path / "mount"
    place.mkdir()
    run_dir, command = prepared.copy(tmp_path / "run", store=str(place))
    with frozen(place):
        running = Command(*command)
        running.wait_for(lambda: events_of(run_dir, "stuck"))
        (told,) = events_of(run_dir, "stuck")
        assert told["path"].startswith(f"file://{place}")
        assert told["process_state"] == "D"
        code, said = said_by_status(run_dir, capsys)
        assert code == 0
        assert f"{told['call']} {told['path']} has not returned for" in said
    running.join(30)
    assert running.code == 1
    assert main(command) == 0


def test_incident_the_staging_is_frozen_when_the_run_goes_on(
    tmp_path, prepared, impatient, s3, bucket, capsys
):
    """What an earlier start had staged is read before any worker begins: a call that hangs is told.

    Once it answers again the work goes on, and what waits there is uploaded.
    """
    run_dir, command = prepared.copy(tmp_path / "run", **bucket)
    with fault_proxy(s3.port, rule=refusing) as proxy:
        place = f"extract.store_options.endpoint={proxy.endpoint}"
        assert main([*command, "--set", place]) == 1
    assert times_recorded(run_dir, "staged")
    units = staging_root(Path(bucket["staging"]), run_dir.root) / "units"
    with frozen(units):
        running = Command(*command)
        running.wait_for(lambda: events_of(run_dir, "stuck"))
        (told,) = events_of(run_dir, "stuck")
        assert told["worker"] is None
        assert told["path"].startswith(bucket["staging"])
        assert told["process_state"] == "D"
        code, said = said_by_status(run_dir, capsys)
        assert code == 0
        assert f"{told['call']} {told['path']} has not returned for" in said
    running.join(60)
    assert running.code == 0
    assert set(times_recorded(run_dir, "staged").values()) == {1}, "none was made again"


def test_incident_the_target_freezes_under_a_worker(
    tmp_path, prepared, small_target, impatient, monkeypatch, capsys
):
    """Weights lie on a mount too: who hangs in them is told by call and path."""
    target = shutil.copytree(small_target, tmp_path / "target")
    run_dir, command = prepared.copy(tmp_path / "run", isolate=True)
    supervise = work.supervise
    with ExitStack() as freeze:

        def freezing(*given, **named):
            freeze.enter_context(frozen(target))
            return supervise(*given, **named)

        monkeypatch.setattr(work, "supervise", freezing)
        running = Command(*command, "--set", f"target.path={target}")
        # On a busy machine the start of a process is told of as well.
        running.wait_for(lambda: [e for e in events_of(run_dir, "stuck") if e["path"]])
        (told,) = (e for e in events_of(run_dir, "stuck") if e["path"])
        assert (told["worker"], told["call"]) == (0, "load target")
        assert told["path"] == str(target)
        assert told["process_state"] == "D"
        code, said = said_by_status(run_dir, capsys)
        assert code == 0
        assert f"worker 0: load target {target} has not returned for" in said
    running.join(60)
    assert not running.is_alive()
    monkeypatch.undo()
    assert main(command) == 0


@pytest.mark.parametrize("what", ["target", "corpus"])
def test_incident_what_a_start_reads_first_is_frozen(
    tmp_path, small_target, samples, impatient, what
):
    target = shutil.copytree(small_target, tmp_path / "target")
    recipe, run_dir = make_run(tmp_path / "run", target, samples)
    place, path = {"target": (target,) * 2, "corpus": (run_dir.corpus, run_dir.prepared)}[what]
    with ThreadPoolExecutor(1) as pool:
        with frozen(place):
            running = pool.submit(stage.run, recipe, run_dir)
            deadline = time.monotonic() + 30
            while not events_of(run_dir, "stuck"):
                assert not running.done()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            (told,) = events_of(run_dir, "stuck")
        running.exception(30)
    assert (told["worker"], told["call"], told["path"]) == (None, f"read {what}", str(path))
    assert told["process_state"] == "D"
    stage.run(recipe, run_dir)
    assert (run_dir.features / "manifest.json").exists()


def test_incident_the_store_stalls_over_the_manifest(
    tmp_path, target, samples, s3, bucket, impatient
):
    """The last calls are watched like the others, and a network that stalls has state S."""

    def rule(request, forward):
        if request.method == "PUT" and request.key.endswith("manifest.json"):
            time.sleep(3)
        return forward(request)

    with fault_proxy(s3.port, rule=rule) as proxy:
        options = {**bucket, "store_options": {**s3.options, "endpoint": proxy.endpoint}}
        recipe, run_dir = make_run(tmp_path / "run", target, samples, **options)
        report = stage.run(recipe, run_dir)
    assert report.undone == ()
    path = f"{report.numbers['store']}/manifest.json"
    (told,) = (e for e in events_of(run_dir, "stuck") if e["path"] == path)
    assert (told["worker"], told["call"], told["process_state"]) == (None, "put", "S")
    (ended,) = (e for e in events_of(run_dir, "unstuck") if e["path"] == path)
    assert ended["seconds"] >= 2.5


def refusing(request, forward):
    """No shard may be put."""
    if request.method == "PUT" and "unit-" in request.key:
        return answer(403, "Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
    return forward(request)


def test_incident_storage_freezes_for_one_worker(tmp_path, prepared, monkeypatch, capsys):
    """One worker's read never returns: it is named, and the others do all the rest."""
    monkeypatch.setattr(work, "open_worker", open_reader)
    monkeypatch.setattr(work, "Policy", partial(Policy, stuck_after=1.0, kill_after=2.0))
    run_dir, command = prepared.copy(tmp_path / "run", isolate=True)
    corpus, aside = run_dir.prepared, run_dir.prepared.with_suffix(".aside")
    shutil.copy2(corpus, aside)
    os.mkfifo(pipe := tmp_path / "pipe")
    original = work.Progress.add

    def piping(self, index, times):
        original(self, index, times)
        if index == 9:
            # Who opens a pipe that nobody writes to waits for ever; the other one is kept from it.
            os.kill(worker_pids(run_dir)[1], signal.SIGSTOP)
            pipe.replace(corpus)

    monkeypatch.setattr(work.Progress, "add", piping)
    running = Command(*command, "--set", "target.workers=2")
    running.wait_for(lambda: len(worker_pids(run_dir)) == 2)
    frozen_pid, other_pid = worker_pids(run_dir)
    running.wait_for(lambda: waits_in(frozen_pid, "wait_for_partner"))
    aside.replace(corpus)
    os.kill(other_pid, signal.SIGCONT)

    running.wait_for(lambda: any(call.call == "read corpus" for call in now(run_dir).stuck))
    told = next(e for e in events_of(run_dir, "stuck") if e["call"] == "read corpus")
    assert (told["worker"], told["worker_pid"]) == (0, frozen_pid)
    assert told["path"] == str(corpus)
    code, said = said_by_status(run_dir, capsys)
    assert code == 0
    assert f"worker 0: read corpus {corpus} has not returned for" in said
    running.join(60)
    # In the end its unit is all that is left, and the other worker makes that too.
    assert running.code == 0
    (killed,) = (e for e in events_of(run_dir, "worker") if e["what"] == "died")
    assert re.fullmatch(r"killed after \d+ seconds in a call", killed["how"])
    made = events_of(run_dir, "finished")[0]["report"]
    assert made["samples"] == 60
    assert made["units_quarantined"] == 0


def worker_pids(run_dir):
    return [e["worker_pid"] for e in events_of(run_dir, "worker") if e["what"] == "started"]


def waits_in(pid, name):
    return Path(f"/proc/{pid}/wchan").read_text() == name


# Killed, moved, asked


def test_incident_is_it_running_is_it_skipping(tmp_path, prepared, monkeypatch, capsys):
    """Asked while a resume looks at what is there, and while it works, and after it was stopped."""
    run_dir, command = prepared.copy(tmp_path / "run", shard_bytes=4096)
    original = work.Progress.add

    def stopping(self, index, times):
        original(self, index, times)
        if self.counts().done > 20:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(work.Progress, "add", stopping)
    assert main(command) == 130
    verified = len(times_recorded(run_dir, "verified"))
    code, said = said_by_status(run_dir, capsys)
    assert (code, "skipping" in said) == (1, False)

    monkeypatch.setattr(work.Progress, "add", original)
    monkeypatch.setattr(telling, "_EVERY", 0.0)
    reached, go_on = threading.Event(), threading.Event()
    judged, seen = ledger._Judge.unit, []

    def waiting(self, unit):
        seen.append(unit)
        if len(seen) == verified:
            reached.set()
            assert go_on.wait(30)
        return judged(self, unit)

    monkeypatch.setattr(ledger._Judge, "unit", waiting)
    running = Command(*command)
    try:
        running.wait_for(reached.is_set)
        running.wait_for(lambda: now(run_dir).units_skipped > 0)
        found = now(run_dir)
        assert (found.state, found.workers) == ("skipping", ())
        assert 0 < found.units_skipped == found.units_done < verified < found.units
        counts = extraction(run_dir).counts
        assert (counts.rate, counts.eta) == (None, None), "those of the last start"
        code, said = said_by_status(run_dir, capsys)
        told = rf"extract: skipping what is there and verified: \d+ of {found.units} shards so far"
        assert code == 0
        assert re.search(told, said)
    finally:
        go_on.set()
    running.wait_for(lambda: now(run_dir).workers)
    assert now(run_dir).state == ""
    running.join(60)
    assert running.code == 0
    code, said = said_by_status(run_dir, capsys)
    assert (code, "skipping" in said) == (0, False)
    assert "samples were done by earlier runs" in said


def test_incident_the_machine_is_killed_half_way_and_the_storage_moved(
    tmp_path, prepared, server, monkeypatch, capsys
):
    """How the last run ended, and what survived, comes first; only what is not proven is redone.

    The run directory holds all that this takes: recipe and data of the first start are gone.
    """
    shards = {"shard_bytes": 4096}
    whole, undisturbed = prepared.copy(tmp_path / "whole", **shards)
    assert main(undisturbed) == 0
    run_dir, command = prepared.copy(tmp_path / "run", isolate=True, **shards)
    server.log = tmp_path / "log"
    pid = server.start(*command)
    wait_until(lambda: len(events_of(run_dir, "progress")) > 5, pid, "it made five shards")
    children = psutil.Process(pid).children(recursive=True)
    os.killpg(pid, signal.SIGKILL)
    assert server.wait(pid) == -signal.SIGKILL
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children), "a worker outlived it"
    assert not (run_dir.features / "manifest.json").exists(), "killed too late"
    Path(command[1]).unlink()
    moved = RunDir(tmp_path / "elsewhere" / "run")
    moved.root.parent.mkdir()
    run_dir.root.rename(moved.root)
    made = times_recorded(moved, "verified")
    stamps = {key: (moved.features / key).stat().st_mtime_ns for key in made}

    code, said = said_by_status(moved, capsys)
    assert code == 1
    assert f"Process {pid} on {os.uname().nodename} ended without a word" in said
    done = extraction(moved).counts.done
    assert 0 < done < 60

    monkeypatch.setattr(telling, "boot_id", lambda: "that of a start since")
    assert main(["extract", "--run", str(moved.root), "--set", "extract.isolate=false"]) == 0
    first, *_ = (line for line in capsys.readouterr().err.splitlines() if " extract: " in line)
    assert f"The last run, process {pid} on " in first
    assert "ended with its machine, which was started anew since" in first
    (recovery,) = events_of(moved, "recovery")
    assert recovery["ending"] == "reboot"
    survived = re.search(r"Survived: ([\d,]+) of (\d+) shards, verified", str(recovery["lines"]))
    assert len(made) <= int(survived[1]) <= len(made) + 1
    assert set(times_recorded(moved, "verified").values()) == {1}
    for key, stamp in stamps.items():
        assert (moved.features / key).stat().st_mtime_ns == stamp, f"{key} was made again"
    assert contents(moved.features) == contents(whole.features)
    assert not list(moved.root.rglob("*.partial"))
    code, said = said_by_status(moved, capsys)
    assert code == 0
    counts = extraction(moved).counts
    assert counts.done == counts.total == 60
    assert done <= counts.skipped < 60


# Full disks


@pytest.mark.parametrize("place", ["the run's", "another"])
def test_incident_the_disk_runs_full(tmp_path, prepared, monkeypatch, capsys, caplog, place):
    """ENOSPC pauses the work and is told; it goes on by itself once there is room."""
    with small_disk(tmp_path / "small", 8 << 20) as disk:
        root, store = disk / "run", ""
        if place == "another":
            root, store = tmp_path / "run", str(disk / "store")
        run_dir, command = prepared.copy(root, store=store)
        fill = filled_after(monkeypatch, disk, shards=5)
        running = Command(*command)
        running.wait_for(lambda: now(run_dir).waiting)
        waiting = now(run_dir).waiting
        assert waiting.kind in ("space", "journal")
        assert str(disk) in waiting.reason
        told = [e for e in events_of(run_dir, "progress") if e.get("waiting")]
        assert told[0]["t"] - events_of(run_dir, "waiting")[0]["t"] < 2, "told at once"
        code, said = said_by_status(run_dir, capsys)
        assert code == 0
        assert re.search(rf"extract: waits for [\d.]+s: {disk}", said)
        time.sleep(0.5)
        assert running.is_alive()
        done = now(run_dir).units_done
        fill.unlink()
        running.join(40)
        assert running.code == 0, capsys.readouterr().err
        assert f"extract: waiting: {disk}" in caplog.text
        assert "extract: going on after" in caplog.text
        assert f"{disk}" in capsys.readouterr().out, "the report says where there was no room"
        assert 5 <= done < 58
        assert set(times_recorded(run_dir, "verified").values()) == {1}
        assert main(["verify", str(run_dir.root), "--deep"]) == 0
        assert not list(disk.rglob("*.partial"))


def test_incident_the_disk_stays_full(tmp_path, prepared, monkeypatch, capsys):
    """After `space_wait` it gives up, with an exit code and what to do; nothing is lost."""
    with small_disk(tmp_path / "small", 8 << 20) as disk:
        run_dir, command = prepared.copy(tmp_path / "run", store=str(disk / "s"), space_wait=1.0)
        fill = filled_after(monkeypatch, disk, shards=5)
        assert main(command) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ")
        assert str(disk) in last
        assert "Make room" in last
        made = times_recorded(run_dir, "verified")
        assert len(made) == 6
        fill.unlink()
        monkeypatch.undo()
        assert main(command) == 0
        assert "ended because there was no room left" in capsys.readouterr().err
        assert set(times_recorded(run_dir, "verified").values()) == {1}


def filled_after(monkeypatch, disk, *, shards):
    """Somebody fills the disk to the last byte, once so many shards are there."""
    fill = disk / "of somebody else"
    original = work.Progress.add

    def filling(self, index, times):
        original(self, index, times)
        if index == shards:
            with fill.open("wb", buffering=0) as file:
                for size in (1 << 20, 4096, 1):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        continue

    monkeypatch.setattr(work.Progress, "add", filling)
    return fill


# Staging


@pytest.fixture
def clean(tmp_path, target, samples):
    """The shards as they are without any incident, coded as in a bucket."""
    recipe, run_dir = make_run(tmp_path / "clean", target, samples, codec="planes")
    stage.run(recipe, run_dir)
    return {k: v for k, v in contents(run_dir.features).items() if k.startswith("unit-")}


def test_incident_stale_request_files_of_a_previous_run_in_shared_memory(
    tmp_path, target, samples, bucket, clean, caplog
):
    """Recognised by owner: those of runs that are gone, and what no record knows, are removed."""
    caplog.set_level("INFO")
    place = Path(bucket["staging"])
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket)
    stale = {}
    live = Staging(place, tmp_path / "alive")
    for root in (tmp_path / "gone", tmp_path / "dead", tmp_path / "alive", run_dir.root):
        if root != tmp_path / "alive":
            with closing(Staging(place, root)) as staging:
                staging.path("unit-000000.safetensors").write_bytes(b"of another time")
        stale[root.name] = staging_root(place, root) / "units" / "unit-000000.safetensors"
        stale[root.name].write_bytes(b"of another time")
    shutil.rmtree(tmp_path / "gone")
    # A name of this plan, in this run's own folder, whole as a shard: and never recorded.
    (stale["run"].with_name("unit-000001.safetensors")).write_bytes(
        clean["unit-000002.safetensors"]
    )
    with closing(live):
        report = stage.run(recipe, run_dir)
    assert report.numbers["units_of_earlier_runs"] == 0
    assert objects(bucket_of(recipe, run_dir)) == clean
    assert not stale["gone"].exists()
    assert "removed 1 staging folder of runs that are gone" in caplog.text
    assert stale["dead"].read_bytes() == b"of another time"
    go_on = f"`paceline extract --run {tmp_path / 'dead'}` goes on with them"
    assert f"of the run {tmp_path / 'dead'}, which is not at work; {go_on}" in caplog.text
    assert stale["alive"].read_bytes() == b"of another time"
    assert not staging_root(place, run_dir.root).exists()
    assert "removed unit-000001.safetensors: not recorded as waiting" in caplog.text


def test_t_46_incident_tmpfs_full_because_the_uploads_lag(tmp_path, s3, bucket, wide_target):
    """Producers wait: staging never holds more than its budget, and the upload sets the pace."""
    limit, count = 4 << 20, 20
    # Of 1 MiB each, as they may be at most.
    samples = [make_sample(n, 338) for n in range(count)]
    with fault_proxy(s3.port, rule=slowly(0.15)) as proxy:
        options = {**bucket, "store_options": {**s3.options, "endpoint": proxy.endpoint}}
        recipe, run_dir = make_run(
            tmp_path / "run",
            wide_target,
            samples,
            **options,
            shard_bytes=1 << 20,
            batch_tokens=338,
            staging_bytes=limit,
            uploads=1,
            dtype="float32",
            codec="none",
        )
        with watched_peak(Path(bucket["staging"])) as peak:
            report = stage.run(recipe, run_dir)
    assert report.numbers["units"] == count
    assert 2 << 20 < max(peak) <= limit
    told = events_of(run_dir, "progress")
    assert max(e["staging_bytes"] for e in told if "staging_bytes" in e) <= limit
    assert any((e.get("waiting") or {}).get("kind") == "budget" for e in told)
    assert any(line.startswith("staging was full for ") for line in report.lines)
    assert any(re.search(r"uploaded \d.* of one core", line) for line in report.lines)
    assert len(objects(bucket_of(with_extract(recipe, **bucket), run_dir))) == count
    assert not staging_root(Path(bucket["staging"]), run_dir.root).exists()


def test_t_46_a_budget_below_one_shard_names_the_smallest_that_works(
    tmp_path, target, samples, bucket
):
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket, staging_bytes=4000)
    with pytest.raises(RecipeError, match=r"extract\.staging_bytes is 4,000") as refused:
        stage.run(recipe, run_dir)
    smallest = int(re.search(r"at least (\d+)", str(refused.value))[1])
    for limit in (smallest - 1, smallest):
        asked = with_extract(recipe, staging_bytes=limit)
        if limit < smallest:
            with pytest.raises(RecipeError, match=f"at least {smallest}"):
                stage.run(asked, run_dir)
        else:
            assert "manifest" in stage.run(asked, run_dir).numbers


def test_incident_hundreds_of_upload_processes(tmp_path, s3, bucket, target, samples):
    """One bounded pool of threads uploads: no process beside the workers, however slow it goes."""
    with fault_proxy(s3.port, rule=slowly(0.04)) as proxy:
        options = {**bucket, "store_options": {**s3.options, "endpoint": proxy.endpoint}}
        recipe, run_dir = make_run(tmp_path / "run", target, samples, **options, uploads=3)
        me = psutil.Process()
        before = set(me.children(recursive=True))
        seen = []

        def look(ending):
            while not ending.wait(0.005):
                names = [thread.name for thread in threading.enumerate()]
                uploading = sum(name.startswith("paceline-upload-") for name in names)
                seen.append((set(me.children(recursive=True)) - before, uploading))

        with beside(look):
            stage.run(recipe, run_dir)
        parts = sum(request.method == "PUT" for request in proxy.seen)
    assert parts >= len(objects(bucket_of(with_extract(recipe, **bucket), run_dir)))
    assert len(seen) > 10
    assert set().union(*(children for children, _ in seen)) == set()
    assert max(uploading for _, uploading in seen) == 3


def test_incident_others_fill_the_staging_place(tmp_path, target, samples, bucket, clean, caplog):
    """Above the mark with nothing of ours there: whose bytes they are is told, and one goes on
    in the run directory.
    """
    caplog.set_level("INFO")
    with small_disk(tmp_path / "shm", 8 << 20) as shm:
        (shm / "psm_of_another").write_bytes(bytes(7 << 20))
        recipe, run_dir = make_run(
            tmp_path / "run",
            target,
            samples,
            **{**bucket, "staging": str(shm), "high_mark": 0.8, "low_mark": 0.7},
        )
        report = stage.run(recipe, run_dir)
    assert f"Shards are staged in {run_dir.staging}" in caplog.text
    assert objects(bucket_of(recipe, run_dir)) == clean
    assert "manifest" in report.numbers
    assert not run_dir.staging.exists() or not list(run_dir.staging.iterdir())


def test_incident_others_fill_every_staging_place(tmp_path, target, samples, bucket, caplog):
    """With no place left it says whose bytes they are, and gives up after `space_wait`."""
    with small_disk(tmp_path / "small", 8 << 20) as disk:
        (disk / "psm_of_another").write_bytes(bytes(7 << 20))
        marks = {"high_mark": 0.8, "low_mark": 0.7, "space_wait": 2.0}
        recipe, run_dir = make_run(
            disk / "run", target, samples, **{**bucket, "staging": str(disk / "shm"), **marks}
        )
        with pytest.raises(StorageRefused) as refused:
            stage.run(recipe, run_dir)
        assert refused.value.exit_code == 1
        assert f"largest there: {disk}/psm_of_another of root (7.3 MB)" in str(refused.value)
        assert "Make room, or choose another `extract.staging`" in str(refused.value)
        assert events_of(run_dir, "waiting")[0]["wait"] == "space"
        (disk / "psm_of_another").unlink()
        assert "manifest" in stage.run(recipe, run_dir).numbers


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory):
    """3,072 bytes a token of two taps and last in fp32."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    return tiny_model("llama", folder, layers=5, hidden=256)


def slowly(seconds):
    """A store that takes its time for every object."""

    def rule(request, forward):
        if request.method == "PUT":
            time.sleep(seconds)
        return forward(request)

    return rule


@contextmanager
def watched_peak(folder):
    """Bytes below a folder, again and again."""
    found = [0]

    def look(ending):
        while not ending.wait(0.002):
            found.append(bytes_below(folder))

    with beside(look):
        yield found


@contextmanager
def beside(look):
    """`look(ending)` runs in a thread for as long as the block."""
    ending = threading.Event()
    thread = threading.Thread(target=look, args=(ending,))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


# Samples and workers that fail


def test_incident_3_samples_failed_among_many_and_only_holes_show_it(
    tmp_path, target, monkeypatch, capsys
):
    """The inventory names every missing sample by unit range; they are tried again."""
    lost = (5, 6, 40)
    ids = [f"{n:032x}" for n in range(60)]
    recipe, run_dir = make_run(
        tmp_path / "run", target, [make_sample(n, 10) for n in range(60)], shard_bytes=10 * 192
    )
    whole = making.write_shard

    def failing(path, *arguments, **named):
        if any(f"unit-{n:06d}" in path.name for n in lost):
            raise TargetError("this one cannot be done today")
        return whole(path, *arguments, **named)

    monkeypatch.setattr(making, "write_shard", failing)
    report = stage.run(recipe, run_dir)
    assert [line[:11] for line in report.undone] == [f"unit-{n:06d}" for n in lost]
    assert all("(1 sample) was set aside: " in line for line in report.undone)
    assert report.numbers["samples"] == 57
    assert main(["verify", str(run_dir.root), "--ids", str(tmp_path / "ids")]) == 1
    told = capsys.readouterr().out
    assert re.search(rf"shards 5-6 +quarantined +2 samples  {ids[5]}, {ids[6]}", told)
    assert re.search(rf"shard 40 +quarantined +1 sample  {ids[40]}", told)
    assert "unit-000040.safetensors failed 2 times" in told
    assert (tmp_path / "ids").read_text().split() == [ids[n] for n in lost]
    monkeypatch.undo()
    report = stage.run(recipe, run_dir)
    assert report.undone == ()
    assert report.numbers["units_of_earlier_runs"] == 57
    assert set(times_recorded(run_dir, "verified").values()) == {1}
    assert FeatureReader(run_dir.features).sample_ids == tuple(ids)
    assert main(["verify", str(run_dir.root), "--deep"]) == 0


def test_incident_a_sample_that_kills_its_worker(tmp_path, target, monkeypatch, capsys):
    """After two deaths it is set aside by name, and all others are made."""
    monkeypatch.setattr(work, "open_worker", open_poisoned)
    monkeypatch.setattr(work, "Policy", partial(Policy, backoff=0.05))
    samples = [make_sample(n, 10) for n in range(12)]
    recipe, run_dir = make_run(
        tmp_path / "run", target, samples, shard_bytes=10 * 192, isolate=True
    )
    report = stage.run(recipe, run_dir)
    (undone,) = report.undone
    assert undone.startswith(f"{POISON} (1 sample) was set aside: worker 0 (process ")
    assert "was killed by SIGKILL" in undone
    assert report.numbers["deaths"] == 2
    assert report.numbers["units_redone"] == 1
    assert "1 shard redone" in report.lines[0]
    assert "1 shard begun again after a worker's death or failure." in report.lines
    (failed,) = events_of(run_dir, "failed")
    assert failed["redone"] == {"after a death or failure": 1}
    assert (
        "extract: redone 1 shard: 1 after a death or failure" in said_by_status(run_dir, capsys)[1]
    )
    assert set(times_recorded(run_dir, "verified")) == {
        f"unit-{n:06d}.safetensors" for n in range(12) if n != 3
    }
    assert not (run_dir.features / "manifest.json").exists()
    assert [e["what"] for e in events_of(run_dir, "worker")] == [
        *("started", "died", "restarted", "died", "restarted")
    ]


def test_incident_a_set_aside_shard_may_be_allowed(tmp_path, broken_target):
    """`allow_quarantined` publishes without it; what is missing stands in the manifest by name."""
    samples = [make_sample(n, 8) for n in range(12)]
    samples = [dataclasses.replace(s, input_ids=[i % 70 for i in s.input_ids]) for s in samples]
    samples[0].input_ids[3] = 77
    recipe, run_dir = make_run(
        tmp_path / "run", broken_target, samples, shard_bytes=8 * 192, allow_quarantined=1
    )
    report = stage.run(recipe, run_dir)
    assert "not finite in float32" in report.undone[0]
    reader = FeatureReader(run_dir.features)
    (aside,) = reader.manifest.quarantined
    assert aside.sample_ids == (samples[0].sample_id,)
    assert "not finite" in aside.reason
    assert reader.sample_ids == tuple(s.sample_id for s in samples[1:])
    assert stage.run(recipe, run_dir).skipped


def test_incident_workers_of_other_code_in_one_run(tmp_path, target, samples, monkeypatch):
    """Files of the package that changed under a run are no reason to mix two programs' shards."""
    monkeypatch.setattr(work, "source_hash", lambda: "0" * 16)
    wakers = []
    monkeypatch.setattr(work, "Waker", lambda: wakers.append(Waker()) or wakers[0])
    recipe, run_dir = make_run(tmp_path / "run", target, samples, isolate=True)
    with pytest.raises(UserError, match="workers of different code in one run") as refused:
        stage.run(recipe, run_dir)
    assert refused.value.exit_code == 2
    assert not list(run_dir.features.glob("unit-*"))
    assert wakers[0].fileno() == -1, "whatever ends a run, nothing of it stays open"


def test_incident_the_resumed_run_uses_other_weights(tmp_path, target, samples):
    """Stored samples are captured again first: a difference stops the run and names the cause."""
    recipe, run_dir = make_run(tmp_path / "run", target, samples)
    stage.run(recipe, run_dir)
    (run_dir.features / "manifest.json").unlink()
    (run_dir.features / "unit-000007.safetensors").unlink()
    fingerprint = ""
    with Journal(run_dir.features / "journal.jsonl") as journal:
        for path in sorted(run_dir.features.glob("unit-*.safetensors")):
            shard = Shard(path)
            fingerprint = shard.fingerprint
            # As another patch of the engine would have made it, and recorded it in good faith.
            other = dataclasses.replace(shard.features, taps=shard.features.taps * 1.1)
            stat = write_shard(path, other, fingerprint=fingerprint)
            number = int(path.stem.removeprefix("unit-"))
            unit = Unit(number, 0, len(shard.sample_ids), ())
            journal.append(verified_record(unit, stat, fingerprint))
    before = contents(run_dir.features)
    with pytest.raises(TargetError, match="captured again, tap 1 is not what is stored") as stopped:
        stage.run(recipe, run_dir)
    assert "The weights are the same" in str(stopped.value)
    assert "suspect a patch inside an installed package" in str(stopped.value)
    assert contents(run_dir.features) == before, "nothing new is mixed in"
    # Who knows better may go on.
    report = stage.run(with_extract(recipe, recheck_samples=0), run_dir)
    assert report.numbers["units_of_earlier_runs"] == len(before)


# Numbers


def test_incident_the_request_counter_and_the_log_disagree(tmp_path, target):
    """Read, captured and stored are counted apart, and every sample is in one of the counts."""
    samples = [
        make_sample(
            n, 6 + n % 9, loss=0 if n % 7 == 3 else None, split=SPLITS.get(n % 10, Split.TRAIN)
        )
        for n in range(50)
    ]
    recipe, run_dir = make_run(tmp_path / "run", target, samples)
    captured = []
    report, _ = counted_run(recipe, run_dir, captured)
    numbers = report.numbers
    read = len(run_dir.prepared.read_bytes().splitlines())
    left_out = numbers["left_out_heldout"] + numbers["left_out_without_loss"]
    assert read == 50 == numbers["samples"] + left_out + numbers["quarantined_samples"]
    kept = [s for s in samples if s.split is not Split.HELDOUT and s.num_loss_tokens]
    stored = [Shard(path) for path in sorted(run_dir.features.glob("unit-*.safetensors"))]
    assert numbers["units"] == len(stored) == len(captured)
    assert numbers["samples"] == sum(len(s.sample_ids) for s in stored) == len(kept)
    tokens = sum(len(s.input_ids) for s in kept)
    assert numbers["tokens"] == sum(sum(s.lengths) for s in stored) == tokens
    assert numbers["loss_tokens"] == sum(s.num_loss_tokens for s in kept)
    assert numbers["bytes"] == bytes_below(run_dir.features)
    (finished,) = events_of(run_dir, "finished")
    assert finished["done"] == finished["total"] == numbers["samples"]
    assert finished["tokens"] == finished["tokens_total"] == tokens
    assert finished["units_done"] == finished["units"] == len(stored)


SPLITS = {4: Split.VALIDATION, 9: Split.HELDOUT}


def test_incident_thousands_of_copies_per_batch(tmp_path, target):
    """One copy from the device for each forward pass, counted where it is made."""
    recipe, run_dir = make_run(tmp_path / "run", target, make_samples(60), batch_tokens=48)
    captured = []
    _, tasks = counted_run(recipe, run_dir, captured)
    passes = sum(len(task.payload.batches) for task in tasks)
    assert passes > 20
    assert sum(times.copies for times in captured) == passes


def test_incident_kernels_compile_in_the_middle(tmp_path, target, monkeypatch):
    """The first forward pass of each shape class is warm-up: it is no part of the rate."""
    slow = []
    start = Target.start_capture

    def compiling(self, batch, plan, copies):
        kind = (len(batch) - 1).bit_length(), (max(batch.lengths) - 1).bit_length()
        if kind not in slow:
            slow.append(kind)
            time.sleep(0.1)
        return start(self, batch, plan, copies)

    monkeypatch.setattr(Target, "start_capture", compiling)
    recipe, run_dir = make_run(tmp_path / "run", target, make_samples(120))
    captured = []
    began = time.monotonic()
    report, _ = counted_run(recipe, run_dir, captured)
    whole = report.numbers["tokens"] / (time.monotonic() - began)
    assert sum(times.warmed for times in captured) == len(slow) > 3
    # The check of the target, before the first shard, may have been the first of one class.
    assert sum(times.warm_up_seconds for times in captured) > 0.1 * (len(slow) - 1)
    timed = sum(times.timed_tokens for times in captured)
    rate = timed / sum(times.seconds for times in captured)
    assert report.numbers["tokens_per_s"] == pytest.approx(rate, rel=0.01)
    assert rate > 1.2 * whole


def counted_run(recipe, run_dir, captured):
    """The run's report and tasks; `captured` gets what was measured of each unit."""
    tasks = []
    original, supervise = work.Progress.add, work.supervise

    def adding(self, index, times):
        original(self, index, times)
        captured.append(times)

    def supervising(setup, payload, given, *rest, **named):
        tasks.extend(given)
        return supervise(setup, payload, given, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work.Progress, "add", adding)
        patch.setattr(work, "supervise", supervising)
        return stage.run(recipe, run_dir), tasks
