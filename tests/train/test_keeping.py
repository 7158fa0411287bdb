"""Which checkpoints stay: the newest, the best, and every m-th evaluation's for good."""

from dataclasses import replace

import pytest

from paceline.durable.errors import Interrupted
from paceline.recipe.checkpoints import EVALUATION, checkpoints, read_evaluation
from paceline.recipe.training import WITHOUT_EFFECT
from paceline.train import kept, stage
from training_runs import stop_after


@pytest.fixture
def best_is_newest(monkeypatch):
    """Leave the best out of it: it may be any of them."""
    monkeypatch.setattr(kept, "rank", lambda folder, _: int(folder.name.removeprefix("step_")))


def steps(run_dir) -> list[int]:
    return [int(f.name.removeprefix("step_")) for f in checkpoints(run_dir.checkpoints)]


# 7 evaluations of 14 steps of 3 samples: at steps 2, 4, 6, 8, 10, 12, 14.
SEVEN = {"evaluations": 7, "keep_checkpoints": 1}


@pytest.mark.usefixtures("best_is_newest")
@pytest.mark.parametrize(
    ("every", "stay"),
    [(None, [14]), (1, [2, 4, 6, 8, 10, 12, 14]), (2, [4, 8, 12, 14]), (3, [6, 12, 14]), (9, [14])],
)
def test_every_so_many_evaluations_a_checkpoint_stays_for_good(fresh_run, every, stay):
    recipe, run_dir = fresh_run(keep_every=every, **SEVEN)
    stage.run(recipe, run_dir)
    assert steps(run_dir) == stay
    numbers = [read_evaluation(f) for f in checkpoints(run_dir.checkpoints)]
    assert [n.number for n in numbers if n] == [s // 2 for s in stay]


@pytest.mark.usefixtures("best_is_newest")
def test_they_stay_over_a_stop_and_a_look_back(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(keep_every=3, **SEVEN)
    undo = stop_after(monkeypatch, 9)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    # Step 9 is the stop's own, and of no evaluation.
    assert steps(run_dir) == [6, 9]
    stage.run(recipe, run_dir)
    assert steps(run_dir) == [6, 12, 14]
    stage.run(recipe, run_dir, resume_from="step_000006")
    assert steps(run_dir) == [6, 12, 14], "12 was made again, and is kept again"
    assert (run_dir.checkpoints / "step_000012.aside").is_dir()


@pytest.mark.usefixtures("best_is_newest")
def test_the_best_and_the_newest_stay_beside_them(fresh_run):
    recipe, run_dir = fresh_run(keep_every=3, **(SEVEN | {"keep_checkpoints": 2}))
    stage.run(recipe, run_dir)
    assert steps(run_dir) == [6, 12, 14]
    assert "train.keep_every" in WITHOUT_EFFECT
    other = replace(recipe, train=replace(recipe.train, keep_every=None))
    assert stage.run(other, run_dir).skipped, "it is no other training"


@pytest.mark.usefixtures("best_is_newest")
def test_what_cannot_be_told_is_not_removed(fresh_run, monkeypatch, caplog):
    recipe, run_dir = fresh_run(keep_every=5, **SEVEN)
    undo = stop_after(monkeypatch, 11)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    assert steps(run_dir) == [10, 11]
    path = run_dir.checkpoints / "step_000010" / EVALUATION
    path.write_bytes(path.read_bytes()[:-5])
    stage.run(recipe, run_dir)
    assert steps(run_dir) == [10, 14]
    assert f"{path}: not the evaluation that was written" in caplog.text
