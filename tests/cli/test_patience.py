"""A look at files that never comes back is told, and nothing waits for it."""

import os
import time
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.patience import NoAnswer, answered
from paceline.durable.errors import UserError


def test_what_is_found_comes_back():
    assert answered(lambda: {"a": 1, "big": b"x" * 300_000}, "here")["a"] == 1


def test_what_is_raised_is_raised_here():
    def look():
        raise UserError("no such run")

    with pytest.raises(UserError, match="no such run"):
        answered(look, "here")


def test_a_look_that_dies_is_no_answer():
    with pytest.raises(NoAnswer, match="died"):
        answered(lambda: os.kill(os.getpid(), 9), "here")


def test_a_read_that_never_returns_is_told_in_time(tmp_path):
    os.mkfifo(tmp_path / "frozen")
    started = time.monotonic()
    with pytest.raises(NoAnswer, match=r"runs/x does not answer.*process state S"):
        answered((tmp_path / "frozen").read_bytes, "runs/x", seconds=0.3)
    assert time.monotonic() - started < 5


def test_who_is_left_behind_holds_nothing_open(tmp_path):
    """Else a script that reads what `status` prints would wait for the mount after all."""
    ours, theirs = os.pipe()

    def look():
        return [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]

    with (tmp_path / "held").open("wb"):
        found = answered(look, "here")
    os.close(ours)
    os.close(theirs)
    opened = [name for name in found if name != os.devnull and not name.startswith("/proc/")]
    assert len(opened) == 1, "the pipe to who asked"
    assert opened[0].startswith("pipe:")


def test_status_of_a_run_whose_files_hang_ends_with_an_error(tmp_path, capsys, monkeypatch):
    # The recipe is the first file that a status reads; as a FIFO it hangs like a frozen mount.
    monkeypatch.setattr("paceline.cli.status._SECONDS", 0.5)
    (tmp_path / "events").mkdir()
    os.mkfifo(tmp_path / "recipe.yaml")
    assert main(["status", str(tmp_path)]) == 1
    assert "does not answer" in capsys.readouterr().err
