"""`paceline stop`: it ends what runs, and says that nothing is left only where nothing is."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import paceline
from paceline.cli.main import main
from paceline.durable.owner import LOCK, Owner, holder, owned
from paceline.durable.staging import Staging, staging_root
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe, Recipe
from paceline.recipe.write import write_recipe
from run_server import RunServer, ended, wait_for_event
from tiny_run import tiny_project

IDLE = (
    "nothing was running; no temporary file is left in the run directory. Go on with: paceline run "
)
STOPPED = (
    "stopped: no process of the run and no temporary file in its directory is left. "
    "Go on with: paceline run "
)
OWNER = """
import subprocess, sys, time
from pathlib import Path
from paceline.durable.owner import owned
from paceline.flow.signals import signals_noted
root, how = Path(sys.argv[1]), sys.argv[2]
child = [sys.executable, "-c", "import time; time.sleep(600)"]
with owned(root, "paceline run"), signals_noted("this item") as stop:
    if how == "child":
        subprocess.Popen(child, start_new_session=True)
    print("held", flush=True)
    while how == "deaf" or not stop.asked:
        time.sleep(0.02)
    if how == "slow":
        time.sleep(1.0)
    sys.exit(130)
"""


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    write_recipe(Recipe(), run.recipe)
    for folder in (run.corpus, run.features, run.checkpoints, run.events):
        folder.mkdir()
    return run


@pytest.fixture
def own(run) -> Iterator:
    """Start a process that holds the run in one way or another."""
    started: list[subprocess.Popen] = []

    def start(how: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(run.root), how],
            env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def stop(run: RunDir, *arguments: str) -> int:
    return main(["stop", str(run.root), *arguments])


def dead_pid() -> int:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    return int(ended.stdout)


def test_a_real_run_is_stopped_and_goes_on(tmp_path, capsys):
    recipe = tiny_project(tmp_path)
    run = RunDir(tmp_path / "run")
    with RunServer(tmp_path / "log") as server:
        pid = server.start("run", str(recipe), "--run", str(run.root))
        wait_for_event(run, "regenerate", "start", pid)
        assert stop(run) == 0
        assert server.wait(pid) == 130
        out = capsys.readouterr().out
        assert f"`paceline run` (process {pid}) was sent SIGTERM" in out
        assert "to finish what it has in work: regenerate.\n" in out
        assert out.endswith(f"{STOPPED}--run {run.root}\n")
        assert server.run("run", "--run", str(run.root)) == 0, server.log.read_text()


def test_it_waits_for_what_is_in_work_and_tells_of_it(run, own, capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.stop._TELL_EVERY", 0.3)
    (run.events / "extract.jsonl").touch()
    process = own("slow")
    assert stop(run) == 0
    assert process.wait() == 130
    out = capsys.readouterr().out
    assert re.search(rf"waiting for extract: 0\.\d s, process {process.pid} and 0 that it", out)
    assert STOPPED in out
    assert holder(run.root) is None


def test_after_the_grace_period_it_says_what_it_still_waits_for(run, own, capsys):
    process = own("deaf")
    assert stop(run, "--grace", "0.3") == 1
    err = capsys.readouterr().err
    assert f"still at work in `paceline run`: process {process.pid} (" in err
    assert "`--kill`" in err
    assert process.poll() is None


def test_kill_ends_what_does_not_end_by_itself(run, own, capsys):
    process = own("deaf")
    assert stop(run, "--grace", "0.2", "--kill") == 0
    assert process.wait() == -signal.SIGKILL
    out = capsys.readouterr().out
    assert "not ended after 0.2 s: killing 1 process.\n" in out
    assert STOPPED in out


def test_a_child_in_a_session_of_its_own_is_waited_for_and_killed(run, own, capsys):
    process = own("child")
    (child,) = _children(process.pid)
    assert stop(run, "--grace", "0.5") == 1
    assert f"process {child} (" in capsys.readouterr().err
    assert process.wait() == 130
    assert not ended(child)
    os.kill(child, signal.SIGKILL)


def test_kill_reaches_children_too(run, own, capsys):
    process = own("child")
    (child,) = _children(process.pid)
    assert stop(run, "--grace", "0.5", "--kill") == 0
    assert ended(child)


def test_a_suspended_owner_is_woken_to_end(run, own):
    process = own("quick")
    process.send_signal(signal.SIGSTOP)
    assert stop(run, "--grace", "20") == 0
    assert process.wait() == 130


def test_nothing_running_is_said_and_leftovers_of_the_dead_are_removed(run, capsys):
    dead = dead_pid()
    words = Owner(dead, socket.gethostname(), time.time(), "paceline train")
    (run.root / LOCK).write_bytes(msgspec.json.encode(words))
    half = run.features / f"unit-000003.safetensors.{dead}.partial"
    half.write_bytes(b"x")
    folder = run.checkpoints / "step_000004.partial"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    whole = run.checkpoints / "step_000002"
    whole.mkdir()
    assert stop(run) == 0
    out = capsys.readouterr().out
    assert f"`paceline train` (process {dead} on {socket.gethostname()}) had ended" in out
    assert "removed features/unit-000003.safetensors" in out
    assert "removed checkpoints/step_000004.partial" in out
    assert not half.exists()
    assert not folder.exists()
    assert whole.exists()
    assert out.endswith(f"{IDLE}--run {run.root}\n")
    assert "stopped" not in out


def test_shards_that_wait_for_their_upload_are_named_and_left(run, capsys, tmp_path):
    places = [tmp_path / "staging", run.staging]
    write_recipe(Recipe(extract=ExtractRecipe(staging=str(places[0]))), run.recipe)
    shards = []
    for folder in places:
        staging = Staging(folder, run.root)
        shard = staging.path("unit-000003.safetensors")
        shard.write_bytes(b"x" * 8192)
        staging.close()
        shards.append(shard)
    assert stop(run) == 0
    out = capsys.readouterr().out
    for folder in places:
        told = (
            f"{staging_root(folder, run.root)} holds 8.19 kB of shards that wait for their upload"
        )
        assert told in out
    assert out.count(" holds ") == 2
    assert all(shard.read_bytes() == b"x" * 8192 for shard in shards)
    assert out.endswith(f"{IDLE}--run {run.root}\n")


def test_the_command_to_go_on_with_holds_for_a_path_with_spaces(run, tmp_path, capsys):
    spaced = run.root.rename(tmp_path / "my run")
    assert main(["stop", str(spaced)]) == 0
    told = capsys.readouterr().out.splitlines()[-1].partition("Go on with: ")[2]
    assert shlex.split(told) == ["paceline", "run", "--run", str(spaced)]


@pytest.mark.parametrize(
    ("user", "mode", "hidden", "told"),
    [
        (1000, 0o755, 1, "note: 1 process of other users could not be looked into"),
        (1000, 0o755, 3, "note: 3 processes of other users could not be looked into"),
        (1000, 0o755, 0, None),
        (1000, 0o700, 3, None),
        (0, 0o755, 3, None),
    ],
)
def test_hidden_processes_are_told_of_only_where_they_could_matter(
    run, capsys, monkeypatch, user, mode, hidden, told
):
    for folder in (run.root, *run.root.iterdir()):
        if folder.is_dir():
            folder.chmod(mode)
    monkeypatch.setattr("paceline.durable.processes.openers", lambda _: ({}, hidden))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert stop(run) == 0
    out = capsys.readouterr().out
    assert ("note:" in out) == (told is not None)
    assert (told or "") in out


def test_features_on_another_disk_are_looked_at_too(run, tmp_path):
    disk = tmp_path / "disk"
    run.features.rename(disk)
    run.features.symlink_to(disk)
    half = disk / f"unit.{dead_pid()}.partial"
    half.touch()
    assert stop(run) == 0
    assert not half.exists()


def test_what_a_live_process_writes_is_named_and_left(run, capsys):
    mine = run.corpus / f"prepared.jsonl.{os.getpid()}.partial"
    mine.touch()
    foreign = run.corpus / "download.partial"
    foreign.touch()
    assert stop(run) == 1
    err = capsys.readouterr().err
    assert f"corpus/{mine.name} belongs to process {os.getpid()}, which is alive" in err
    assert "corpus/download.partial is no file of Paceline's" in err
    assert mine.exists()
    assert foreign.exists()
    foreign.unlink()
    os.utime(mine, (1e9, 1e9))  # last written before this process began: the id was reused
    assert stop(run) == 0
    assert not mine.exists()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_process_that_has_a_file_of_the_run_open_is_named(run, capsys, how, monkeypatch):
    monkeypatch.setattr("paceline.cli.stop._SETTLE", 0.3)
    path = run.features / "unit-000001.safetensors"
    path.write_bytes(b"x" * 4096)
    program = "import mmap, sys, time\nfile = open(sys.argv[1], 'rb')\n"
    if how == "mapped":
        program += "data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\nfile.close()\n"
    program += "print(1, flush=True)\ntime.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline() == "1\n"
        assert stop(run) == 1
        err = capsys.readouterr().err
        assert f"process {reader.pid} (" in err
        assert "has features/unit-000001.safetensors open" in err
        reader.kill()
    assert stop(run) == 0


def test_an_owner_on_another_machine_is_named(run, capsys):
    with owned(run.root, "paceline run"):
        words = Owner(4711, "elsewhere", time.time(), "paceline run")
        (run.root / LOCK).write_bytes(msgspec.json.encode(words))
        assert stop(run) == 2
    err = capsys.readouterr().err
    assert "runs on another machine: process 4711 on elsewhere. Run `paceline stop` there." in err


def test_a_process_that_only_has_the_owners_id_is_not_touched(run, capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.stop._LOOK_EVERY", 0.01)
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as innocent,
        owned(run.root, "paceline run"),
    ):
        words = Owner(innocent.pid, socket.gethostname(), time.time(), "paceline run")
        (run.root / LOCK).write_bytes(msgspec.json.encode(words))
        assert stop(run, "--grace", "0", "--kill") == 1
        assert "on this machine that process is another one" in capsys.readouterr().err
        assert innocent.poll() is None
        innocent.kill()


def test_where_open_files_cannot_be_seen_the_start_has_to_be_before_the_lock(run, own, monkeypatch):
    from paceline.durable import processes

    def hidden(_: object):
        raise PermissionError(13, "Permission denied")

    process = own("quick")
    monkeypatch.setattr(processes, "_open_files", hidden)
    now = time.time()
    found = processes.process_with(process.pid, since=now, file=run.root / LOCK)
    assert found is not None
    assert found.pid == process.pid
    assert processes.process_with(process.pid, since=now - 3600, file=run.root / LOCK) is None
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as innocent:
        later = time.time() + 3600
        assert processes.process_with(innocent.pid, since=later, file=run.root / LOCK) is None
        innocent.kill()
    assert processes.process_with(-1, since=now, file=run.root / LOCK) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "absent: not a run directory"),
        (["."], ".: not a run directory"),
        (["run", "--grace", "-1"], "--grace -1.0: give seconds, 0 or more."),
        (["run", "--grace", "nan"], "--grace nan: give seconds"),
    ],
)
def test_what_cannot_be_stopped_is_refused(run, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(run.root.parent)
    assert main(["stop", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_it_loads_no_torch(run):
    program = (
        "import sys; from paceline.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules or code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "stop", str(run.root)],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert IDLE in ran.stdout


def _children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
