"""What averaged drafters had is there until its average is, whatever comes in between."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafting import load_tiny_target, tiny_drafter
from paceline.drafter.checkpoint import load_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import Interrupted
from paceline.durable.fs import RealFileSystem
from paceline.train import stage
from paceline.train.averaging import Outer, Share, trainable
from paceline.train.checkpoint import (
    OPTIMIZER,
    RNG,
    TrainState,
    fresh_state,
    own_file,
    read_state,
    verify_checkpoint,
)
from paceline.train.team_files import (
    begin_unaveraged,
    complete_what_was_left,
    load_velocity,
    seal_unaveraged,
)
from training_runs import contents, newest, stop_after


def share(model: DFlash, number: int) -> Share:
    moved = {name: tensor + 0.1 * (number + 1) for name, tensor in trainable(model).items()}
    return Share(moved, 10 * (number + 1))


def leave_unaveraged(root: Path, model: DFlash, state: TrainState, outer: Outer) -> Path:
    """What two drafters had when the training ended in the middle of their average."""
    partial = begin_unaveraged(root, state.step)
    for number in range(2):
        for name in (OPTIMIZER, RNG):
            (partial / own_file(name, number)).write_bytes(f"{name} of {number}".encode())
    shares = {number: share(model, number) for number in range(2)}
    return seal_unaveraged(partial, model, replace(state, drafters=2), [], shares, outer)


class Killed(BaseException):
    """The end of this process, as near as a test can come to it."""


@contextmanager
def failing(error: BaseException, number: int) -> Iterator[None]:
    """The file or folder `number` that gets its final name does not."""
    original, calls = RealFileSystem.replace, 0

    def rename(self: RealFileSystem, source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        original(self, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RealFileSystem, "replace", rename)
        yield


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "error", [Killed(), OSError(errno.ENOSPC, "No space left on device")], ids=["kill", "full disk"]
)
def test_wherever_the_average_stops_the_next_start_makes_the_same(tmp_path, error, momentum):
    model = tiny_drafter(load_tiny_target(tmp_path))
    outer = Outer(0.7, momentum)
    if momentum:
        outer.velocity = {n: torch.full_like(t, 0.5) for n, t in trainable(model).items()}
    state = replace(fresh_state("f"), step=5)
    left = leave_unaveraged(tmp_path / "left", model, state, outer)
    (made,) = complete_what_was_left(Path(shutil.copytree(left.parent, tmp_path / "made")))
    outer.go(model, [share(model, number) for number in range(2)])
    average, velocity = trainable(load_drafter(made)), load_velocity(made)
    assert all(torch.equal(tensor, average[n]) for n, tensor in trainable(model).items())
    assert velocity.keys() == outer.velocity.keys()
    assert all(torch.equal(tensor, velocity[n]) for n, tensor in outer.velocity.items())
    # Weights, config, velocity where there is one, checksums, and the folder itself.
    for number in range(1, 6 if momentum else 5):
        root = Path(shutil.copytree(left.parent, tmp_path / f"stopped {number}"))
        with failing(error, number), pytest.raises(type(error)):
            complete_what_was_left(root)
        (again,) = complete_what_was_left(root)
        verify_checkpoint(again)
        assert contents(root) == contents(made.parent), number


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "flipped"])
def test_what_is_not_whole_is_passed_over_and_never_in_the_way(tmp_path, how):
    """Whichever file it is: a start that it could stop would be stopped for ever."""
    model = tiny_drafter(load_tiny_target(tmp_path))
    outer = Outer(0.7, 0.9)
    outer.velocity = {n: torch.full_like(t, 0.5) for n, t in trainable(model).items()}
    left = leave_unaveraged(tmp_path / "left", model, replace(fresh_state("f"), step=5), outer)
    files = sorted(p.relative_to(left) for p in left.rglob("*") if p.is_file())
    assert len(files) > 8
    for number, name in enumerate(files):
        root = Path(shutil.copytree(left.parent, tmp_path / f"damaged {number}"))
        path = root / left.name / name
        data = path.read_bytes()
        path.unlink()
        if how != "gone":
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            path.write_bytes({"empty": b"", "cut": data[:middle], "flipped": flipped}[how])
        assert complete_what_was_left(root) == [], name
        assert not list(root.iterdir()), name


def test_what_was_left_does_not_undo_a_look_back(fresh_run, monkeypatch):
    """It is newer than the checkpoint that is asked for, so it is set aside with the others."""
    recipe, run = fresh_run()
    undo = stop_after(monkeypatch, 7)
    with pytest.raises(Interrupted):
        stage.run(recipe, run)
    undo()
    last = newest(run)
    state = replace(read_state(last), step=8)
    leave_unaveraged(run.checkpoints, load_drafter(last), state, Outer(1.0, 0.0))
    stop_after(monkeypatch, 6)
    with pytest.raises(Interrupted):
        stage.run(recipe, run, resume_from="step_000005")
    verify_checkpoint(run.checkpoints / "step_000008.aside")
    assert complete_what_was_left(run.checkpoints) == []
    assert newest(run).name == "step_000006"
