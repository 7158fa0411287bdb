"""A signal at any moment of a training: it goes on to the same end, and no saved step is lost."""

import json
import signal
from collections import Counter
from dataclasses import replace

import pytest

from paceline.durable.errors import Interrupted
from paceline.recipe.checkpoints import EVALUATION, checkpoints, read_evaluation
from paceline.recipe.run_dir import RunDir
from training_moments import MOMENTS, train
from training_runs import assert_same_end, events, newest, step_events

EVALUATED = (5, 9, 14)
"""Steps with an evaluation."""


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """A recipe, and a training by it without a stop."""
    recipe, root, _ = world
    recipe = replace(recipe, train=replace(recipe.train, micro_batch_tokens=1, keep_checkpoints=1))
    run = RunDir(tmp_path_factory.mktemp("undisturbed") / "run")
    run.root.mkdir()
    for name in ("corpus", "features"):
        (run.root / name).symlink_to(root / name)
    assert train(recipe, run) == 0
    return recipe, run


@pytest.fixture
def trial(undisturbed, fresh_run):
    """A recipe, the undisturbed training by it, and another run."""
    return (*undisturbed, fresh_run()[1])


def steps_done(run_dir) -> Counter:
    return Counter(e["step"] for e in events(run_dir, "step"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_training_terminated_at_any_moment_does_no_step_twice(trial, moment):
    recipe, straight, run_dir = trial
    assert train(recipe, run_dir, moment, signal.SIGTERM) == Interrupted.exit_code
    assert not list(run_dir.checkpoints.rglob("*.partial"))
    assert train(recipe, run_dir) == 0
    assert steps_done(run_dir) == Counter(range(1, 15))
    assert step_events(run_dir) == step_events(straight)
    assert_same_end(run_dir, straight)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_training_killed_at_any_moment_repeats_no_step_that_has_a_checkpoint(trial, moment):
    recipe, straight, run_dir = trial
    assert train(recipe, run_dir, moment, signal.SIGKILL) == -signal.SIGKILL
    has_begun = (run_dir.events / "train.jsonl").exists()
    assert has_begun == (moment != "start")
    saved = max([e["step"] for e in events(run_dir, "checkpoint")], default=0) if has_begun else 0
    done = steps_done(run_dir) if has_begun else Counter()
    assert train(recipe, run_dir) == 0
    assert step_events(run_dir) == step_events(straight)
    twice = {step for step, count in steps_done(run_dir).items() if count > 1}
    assert twice == {step for step in done if step > saved} - made_whole(moment)
    assert not list(run_dir.checkpoints.rglob("*.partial"))
    assert_same_end(run_dir, straight)


def made_whole(moment: str) -> set[int]:
    """Steps of a checkpoint that had its name and was not told of yet."""
    return set(range(6, 10)) if moment == "checkpoint written" else set()


@pytest.mark.parametrize("moment", ["evaluation", "last evaluation", "rename of an evaluation"])
def test_a_kill_inside_an_evaluation_costs_the_evaluation_alone(trial, moment):
    recipe, straight, run_dir = trial
    assert train(recipe, run_dir, moment, signal.SIGKILL) == -signal.SIGKILL
    stands = newest(run_dir)
    assert read_evaluation(stands) is None
    assert train(recipe, run_dir) == 0
    assert steps_done(run_dir) == Counter(range(1, 15)), "no step was done twice"
    assert [e["step"] for e in events(run_dir, "checkpoint")] == list(EVALUATED)
    assert {e["step"] for e in events(run_dir, "evaluation")} == {0, *EVALUATED}
    assert_same_end(run_dir, straight)
    last = newest(run_dir)
    evaluation = read_evaluation(last)
    assert evaluation is not None
    assert evaluation.number == len(EVALUATED)


def harmed(text: bytes, kind: str, other: bytes) -> bytes:
    if kind == "torn":
        return text[: len(text) // 2]
    if kind == "another's":
        return other
    value = json.loads(text)
    value["tau"]["ddtree-64"] = 3.9
    return json.dumps(value).encode()


@pytest.mark.parametrize("kind", ["torn", "another's", "edited"])
def test_an_evaluation_that_proves_nothing_is_made_again(fresh_run, kind):
    recipe, straight = fresh_run(keep_checkpoints=3)
    assert train(recipe, straight) == 0
    _, run_dir = fresh_run()
    assert train(recipe, run_dir, "record of the end", signal.SIGKILL) == -signal.SIGKILL
    *_, before, last = checkpoints(run_dir.checkpoints)
    text = (last / EVALUATION).read_bytes()
    (last / EVALUATION).write_bytes(harmed(text, kind, (before / EVALUATION).read_bytes()))
    assert read_evaluation(last) is None
    assert train(recipe, run_dir) == 0
    assert (last / EVALUATION).read_bytes() == text
    assert steps_done(run_dir) == Counter(range(1, 15))
    assert_same_end(run_dir, straight)
