"""A run that begins with a checkpoint of another one, which stays as it was."""

import re
import shutil
from dataclasses import replace

import pytest

from paceline.durable.errors import (
    Interrupted,
    RecipeChanged,
    RecipeError,
    ShardDamaged,
    UserError,
)
from paceline.recipe.checkpoints import Parent, checkpoints, list_checkpoints, read_evaluation
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import read_record
from paceline.train import fork, stage
from paceline.train.checkpoint import read_state, verify_checkpoint
from training_runs import assert_same_end, contents, events, newest, step_events, stop_after


@pytest.fixture(scope="module")
def old(world, tmp_path_factory):
    """A finished training with checkpoints of steps 5, 9 and 14."""
    recipe, root, _ = world
    recipe = replace(recipe, train=replace(recipe.train, keep_checkpoints=3))
    run = RunDir(tmp_path_factory.mktemp("old") / "run")
    run.root.mkdir()
    for name in ("corpus", "features"):
        (run.root / name).symlink_to(root / name)
    stage.run(recipe, run)
    return recipe, run


@pytest.fixture
def new(old, fresh_run):
    """A recipe, a run that has not begun, the old run; the old one must not be touched."""
    recipe, run = old
    before = contents(run.root)
    yield recipe, fresh_run()[1], run
    assert contents(run.root) == before


def changed(recipe, **train):
    return replace(recipe, train=replace(recipe.train, **train))


def source(run: RunDir, step: int = 9) -> str:
    return str(run.checkpoints / f"step_{step:06d}")


def test_a_fork_goes_on_as_the_other_run_did(new):
    recipe, run_dir, old_run = new
    report = stage.run(recipe, run_dir, fork_from=source(old_run))
    assert_same_end(run_dir, old_run)
    assert [e["step"] for e in events(run_dir, "step")] == list(range(10, 15)), "the same steps"
    assert step_events(run_dir) == step_events(old_run)[9:]
    parent = Parent(
        run=str(old_run.root.resolve()),
        name="step_000009",
        step=9,
        fingerprint=read_state(newest(old_run)).fingerprint,
    )
    assert {c.parent for c in list_checkpoints(run_dir.checkpoints)} == {parent}
    assert read_state(newest(run_dir)).parent == parent
    assert report.numbers["parent"]["name"] == "step_000009"
    assert f"forked from {parent.run}, step_000009" in report.lines
    (told,) = events(run_dir, "fork")
    assert (told["run"], told["name"], told["step"]) == (parent.run, "step_000009", 9)
    assert not events(run_dir, "override")
    record = read_record(run_dir.checkpoints, "train")
    assert record is not None
    assert not record.overrides


def test_the_first_checkpoint_is_a_copy_and_is_there_before_a_step(new, monkeypatch):
    recipe, run_dir, old_run = new
    undo = stop_after(monkeypatch, 10)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir, fork_from=source(old_run))
    undo()
    first, second = checkpoints(run_dir.checkpoints)
    assert (first.name, second.name) == ("step_000009", "step_000010")
    verify_checkpoint(first)
    made = old_run.checkpoints / first.name
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "config.json"):
        assert (first / name).read_bytes() == (made / name).read_bytes(), name
    found, wanted = read_evaluation(first), read_evaluation(made)
    assert found is not None
    assert wanted is not None
    assert (found.tau, found.number) == (wanted.tau, wanted.number)
    # The same command goes on, and so does one without the flag.
    stage.run(recipe, run_dir, fork_from=source(old_run))
    assert_same_end(run_dir, old_run)
    assert len(events(run_dir, "fork")) == 1
    assert len(events(run_dir, "step")) == 5
    assert stage.run(recipe, run_dir, fork_from=source(old_run)).skipped


def test_a_fork_that_goes_on_no_longer_needs_the_other_run(new, monkeypatch, tmp_path):
    recipe, run_dir, old_run = new
    gone = RunDir(tmp_path / "gone")
    shutil.copytree(old_run.root, gone.root, symlinks=True)
    undo = stop_after(monkeypatch, 11)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir, fork_from=source(gone))
    undo()
    shutil.rmtree(gone.root)
    stage.run(recipe, run_dir, fork_from=source(gone))
    assert_same_end(run_dir, old_run)


def test_a_fork_killed_before_its_first_checkpoint_begins_again(new, monkeypatch):
    recipe, run_dir, old_run = new
    monkeypatch.setattr(fork, "copy_as_first", None)
    with pytest.raises(TypeError):
        stage.run(recipe, run_dir, fork_from=source(old_run))
    monkeypatch.undo()
    assert not checkpoints(run_dir.checkpoints)
    stage.run(recipe, run_dir, fork_from=source(old_run))
    assert_same_end(run_dir, old_run)


def test_settings_that_may_change_are_recorded_and_others_refused(new):
    recipe, run_dir, old_run = new
    other = changed(recipe, learning_rate=5e-4, epochs=3.0)
    refused = replace(changed(other, seed=1), drafter=replace(recipe.drafter, layers=2))
    with pytest.raises(RecipeChanged) as raised:
        stage.run(refused, run_dir, fork_from=source(old_run))
    told = str(raised.value)
    assert "drafter.layers: 1 -> 2" in told
    assert "train.seed: 0 -> 1" in told
    assert "learning_rate" not in told
    assert not run_dir.checkpoints.exists()
    report = stage.run(other, run_dir, fork_from=source(old_run))
    assert report.numbers["samples"] == 60
    record = read_record(run_dir.checkpoints, "train")
    assert record is not None
    assert [(o.key, o.made, o.asked, o.step) for o in record.overrides] == [
        ("train.epochs", 2.0, 3.0, 9),
        ("train.learning_rate", 1e-3, 5e-4, 9),
    ]
    assert [e["key"] for e in events(run_dir, "override")] == [
        "train.epochs",
        "train.learning_rate",
    ]
    assert stage.run(other, run_dir, fork_from=source(old_run)).skipped
    with pytest.raises(RecipeChanged, match=r"train\.learning_rate: 0\.0005 -> 0\.001"):
        stage.run(changed(other, learning_rate=1e-3), run_dir, fork_from=source(old_run))


def test_a_tau_measured_otherwise_does_not_go_along(new):
    recipe, run_dir, old_run = new
    stage.run(changed(recipe, eval_anchors=2), run_dir, fork_from=source(old_run))
    assert [e["step"] for e in events(run_dir, "evaluation")] == [9, 14], "measured anew"


def test_a_fork_of_a_checkpoint_from_before_an_override_is_compared_with_that(
    new, monkeypatch, tmp_path
):
    recipe, run_dir, old_run = new
    twice = RunDir(tmp_path / "twice")
    shutil.copytree(old_run.root, twice.root, symlinks=True)
    hot = changed(recipe, learning_rate=5e-4)
    stage.run(hot, twice, resume_from="step_000009", allow_change=["train.learning_rate"])
    assert read_state(twice.checkpoints / "step_000009").fingerprint != (
        read_state(newest(twice)).fingerprint
    )
    stage.run(recipe, run_dir, fork_from=source(twice))
    assert not events(run_dir, "override"), "that checkpoint was made with these very settings"
    assert_same_end(run_dir, old_run)


def test_nothing_begins_from_what_is_missing_incomplete_or_at_its_end(new, tmp_path):
    recipe, run_dir, old_run = new
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(old_run.root, copy.root, symlinks=True)
    with pytest.raises(UserError, match="no such folder"):
        stage.run(recipe, run_dir, fork_from=source(old_run, 10))
    for name in ("optimizer.safetensors", "checksums.json"):
        (copy.checkpoints / "step_000009" / name).unlink()
        named = re.escape(f"{copy.checkpoints / 'step_000009' / name}")
        with pytest.raises(ShardDamaged, match=f"--fork-from .*{named}"):
            stage.run(recipe, run_dir, fork_from=source(copy))
    with pytest.raises(RecipeError, match=r"40 samples are done\. Raise it, or --fork-from"):
        stage.run(recipe, run_dir, fork_from=source(old_run, 14))
    (copy.checkpoints / "train.stage.json").unlink()
    with pytest.raises(UserError, match="no record of the training that wrote it"):
        stage.run(recipe, run_dir, fork_from=source(copy, 5))
    assert not run_dir.checkpoints.exists()


def test_a_run_that_has_checkpoints_is_not_forked_over(new, fresh_run):
    recipe, run_dir, old_run = new
    stage.run(recipe, run_dir, fork_from=source(old_run))
    before = contents(run_dir.checkpoints)
    with pytest.raises(UserError, match=r"has checkpoints already, the last step_000014"):
        stage.run(recipe, run_dir, fork_from=source(old_run, 5))
    with pytest.raises(UserError, match="a checkpoint of this very run"):
        stage.run(recipe, run_dir, fork_from=source(run_dir))
    assert contents(run_dir.checkpoints) == before


def test_a_checkpoint_that_is_spoiled_while_it_is_copied_begins_nothing(new, monkeypatch, tmp_path):
    recipe, run_dir, old_run = new
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(old_run.root, copy.root, symlinks=True)
    original = fork.copy_as_first

    def spoiled(folder, *rest):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return original(folder, *rest)

    monkeypatch.setattr(fork, "copy_as_first", spoiled)
    with pytest.raises(ShardDamaged, match="checksum does not hold"):
        stage.run(recipe, run_dir, fork_from=source(copy))
    monkeypatch.undo()
    assert not checkpoints(run_dir.checkpoints)
    stage.run(recipe, run_dir, fork_from=source(old_run))
    assert_same_end(run_dir, old_run)
