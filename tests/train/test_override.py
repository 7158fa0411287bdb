"""T-74: a changed recipe is refused, with the ways out; a change by permission is recorded."""

import shutil
from dataclasses import fields, replace

import pytest
import torch

from paceline.durable.errors import Interrupted, RecipeChanged, RecipeError, UserError
from paceline.extract import stage as extract_stage
from paceline.recipe.checkpoints import checkpoints
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, TrainRecipe
from paceline.recipe.stage import read_record
from paceline.recipe.training import (
    CHANGEABLE,
    WITHOUT_EFFECT,
    require_changeable,
    resolved_compute,
)
from paceline.train import stage
from paceline.train.checkpoint import read_state
from paceline.types.sample import Sample, Split, encode_sample
from paceline.upstream import require_inputs
from training_runs import assert_same_end, contents, events, newest, step_events, stop_after


def changed(recipe: Recipe, **train: object) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **train))


def stopped_run(fresh_run, monkeypatch, step: int = 7, **train: object):
    recipe, run_dir = fresh_run(**train)
    undo = stop_after(monkeypatch, step)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    return recipe, run_dir


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 5e-4}, "train.learning_rate: 0.001 -> 0.0005"),
        ({"batch_samples": 4}, "train.batch_samples: 3 -> 4"),
        ({"schedule": "wsd"}, "train.schedule: 'cosine' -> 'wsd'"),
        ({"compute": "bfloat16"}, "train.compute: 'float32' -> 'bfloat16'"),
        ({"betas": (0.9, 0.99)}, "train.betas.1: 0.95 -> 0.99"),
    ],
)
def test_t_74_another_setting_is_refused_with_three_ways_out(fresh_run, monkeypatch, change, said):
    recipe, run_dir = stopped_run(fresh_run, monkeypatch)
    before = contents(run_dir.checkpoints)
    with pytest.raises(RecipeChanged) as raised:
        stage.run(changed(recipe, **change), run_dir)
    told = str(raised.value)
    assert said in told
    assert "a new run directory" in told
    assert "put the old values back" in told
    assert f"`--allow-change train.{next(iter(change))}`" in told
    assert contents(run_dir.checkpoints) == before


def test_t_74_other_data_and_another_drafter_are_refused_for_good(
    world, fresh_run, monkeypatch, tmp_path
):
    recipe, run_dir = stopped_run(fresh_run, monkeypatch)
    layers = replace(recipe, drafter=replace(recipe.drafter, layers=2))
    with pytest.raises(RecipeChanged, match=r"drafter\.layers: 1 -> 2") as raised:
        stage.run(layers, run_dir)
    assert "--allow-change" not in str(raised.value)
    with pytest.raises(RecipeChanged, match=r"train\.seed: 0 -> 1") as raised:
        stage.run(changed(recipe, seed=1, learning_rate=1e-4), run_dir)
    assert "--allow-change" not in str(raised.value), "one of the two would not do"

    more = RunDir(tmp_path / "more")
    more.corpus.mkdir(parents=True)
    row = Sample(
        sample_id=f"{99:032x}", prompt_id=f"{99:032x}", source="toy", split=Split.TRAIN,
        messages=[], input_ids=list(range(20)), loss_spans=[(6, 20)],
    )  # fmt: skip
    old = RunDir(world[1]).prepared.read_bytes()
    more.prepared.write_bytes(old + encode_sample(row))
    extract_stage.run(recipe, more)
    for name in ("corpus", "features"):
        (run_dir.root / name).unlink()
        (run_dir.root / name).symlink_to(more.root / name)
    with pytest.raises(RecipeChanged, match=r"features: '\w+' -> '\w+'") as raised:
        stage.run(recipe, run_dir)
    assert "--allow-change" not in str(raised.value)


def test_t_74_what_determines_no_result_passes(fresh_run, monkeypatch):
    recipe, straight = fresh_run()
    stage.run(recipe, straight)
    _, run_dir = stopped_run(fresh_run, monkeypatch)
    stage.run(changed(recipe, threads=2, keep_checkpoints=1), run_dir)
    assert stage.run(recipe, run_dir).skipped
    record = read_record(run_dir.checkpoints, "train")
    assert record is not None
    assert record.overrides == ()
    # Two threads add up in another order: equal in what was consumed, not in the last bit.
    assert read_state(newest(run_dir)).tokens == read_state(newest(straight)).tokens


def test_t_74_an_allowed_change_goes_on_and_is_recorded(fresh_run, monkeypatch, caplog):
    recipe, run_dir = stopped_run(fresh_run, monkeypatch)
    made = read_record(run_dir.checkpoints, "train")
    lower = changed(recipe, learning_rate=5e-4, betas=(0.9, 0.99))
    keys = ("train.learning_rate", "train.betas")
    with pytest.raises(RecipeChanged, match=r"train\.betas\.1: 0\.95 -> 0\.99") as raised:
        stage.run(lower, run_dir, allow_change=keys[:1])
    assert "train.learning_rate:" not in str(raised.value), "that one is allowed"
    needed = "`--allow-change train.learning_rate --allow-change train.betas`"
    assert needed in str(raised.value), "and still has to be said"
    report = stage.run(lower, run_dir, allow_change=keys)
    assert report.numbers["samples"] == 40
    record = read_record(run_dir.checkpoints, "train")
    assert record is not None
    assert [(o.key, o.made, o.asked, o.step) for o in record.overrides] == [
        ("train.betas.1", 0.95, 0.99, 7),
        ("train.learning_rate", 1e-3, 5e-4, 7),
    ]
    assert {o.fingerprint for o in record.overrides} == {made.fingerprint}
    assert record.fields["train.learning_rate"] == 5e-4
    told = [(e["key"], e["made"], e["asked"], e["step"]) for e in events(run_dir, "override")]
    assert told == [(o.key, o.made, o.asked, o.step) for o in record.overrides]
    assert "train.learning_rate changes from 0.001 to 0.0005 at step 7" in caplog.text
    rates = [e["learning_rate"] for e in step_events(run_dir)]
    _, straight = fresh_run()
    stage.run(recipe, straight)
    before = [e["learning_rate"] for e in step_events(straight)]
    assert rates[:7] == before[:7]
    assert rates[7:] == pytest.approx([r / 2 for r in before[7:]])
    require_train(lower, run_dir)
    with pytest.raises(RecipeChanged, match=r"train\.learning_rate: 0\.0005 -> 0\.001"):
        require_train(recipe, run_dir)
    assert stage.run(lower, run_dir).skipped
    assert stage.run(lower, run_dir, allow_change=keys).skipped, "nothing is left to change"
    with pytest.raises(RecipeChanged, match=r"train\.learning_rate: 0\.0005 -> 0\.001"):
        stage.run(recipe, run_dir)


def require_train(recipe: Recipe, run_dir: RunDir) -> None:
    """What score asks of the training's record, without the stages before it."""
    try:
        require_inputs("score", recipe, run_dir)
    except UserError as error:
        # These runs have features and samples, and no record of how they were made.
        if isinstance(error, RecipeChanged) or "`paceline prepare`" not in str(error):
            raise
        prepared = read_record(run_dir.corpus, "prepare")
        assert prepared is None
        from paceline import upstream

        record = read_record(run_dir.checkpoints, "train")
        assert record is not None
        keys, rows = upstream._changed(record, upstream._asked(recipe, record))
        if keys:
            raise RecipeChanged(rows) from error


def test_a_checkpoint_from_before_the_change_is_still_this_runs_and_only_this_ones(
    fresh_run, monkeypatch
):
    recipe, run_dir = stopped_run(fresh_run, monkeypatch, keep_checkpoints=5)
    lower = changed(recipe, learning_rate=5e-4)
    stage.run(lower, run_dir, allow_change=["train.learning_rate"])
    folders = {f.name: f for f in checkpoints(run_dir.checkpoints)}
    old, new = folders["step_000007"], folders["step_000009"]
    assert read_state(old).fingerprint != read_state(new).fingerprint
    first = contents(newest(run_dir))
    stage.run(lower, run_dir, resume_from="step_000007")
    again = contents(newest(run_dir))
    assert {n: b for n, b in first.items() if n.endswith("safetensors")} == {
        n: b for n, b in again.items() if n.endswith("safetensors")
    }
    # Both fall to the training of before: it is damaged from step 9 on.
    for name in ("step_000009", "step_000014"):
        (run_dir.checkpoints / name / "config.json").write_text("{}")
    stage.run(lower, run_dir)
    assert contents(newest(run_dir))["model.safetensors"] == first["model.safetensors"]

    _, other = fresh_run(learning_rate=5e-4)
    other.checkpoints.mkdir()
    shutil.copytree(run_dir.checkpoints / "step_000007", other.checkpoints / "step_000007")
    with pytest.raises(RecipeChanged, match="a checkpoint of another training"):
        stage.run(lower, other)
    with pytest.raises(RecipeChanged, match="a checkpoint of another training"):
        stage.run(lower, other, resume_from="step_000007")


def test_a_change_and_back_is_two_records_and_the_first_fingerprint(fresh_run, monkeypatch):
    recipe, run_dir = stopped_run(fresh_run, monkeypatch, step=3)
    first = read_record(run_dir.checkpoints, "train").fingerprint
    undo = stop_after(monkeypatch, 6)
    with pytest.raises(Interrupted):
        stage.run(changed(recipe, grad_clip=0.5), run_dir, allow_change=["train.grad_clip"])
    undo()
    stage.run(recipe, run_dir, allow_change=["train.grad_clip"])
    record = read_record(run_dir.checkpoints, "train")
    assert [(o.made, o.asked, o.step) for o in record.overrides] == [(1.0, 0.5, 3), (0.5, 1.0, 6)]
    assert record.fingerprint == first
    assert stage.run(recipe, run_dir).skipped


def test_a_finished_training_is_extended_from_its_last_checkpoint(fresh_run):
    recipe, run_dir = fresh_run()
    stage.run(recipe, run_dir)
    longer = changed(recipe, epochs=3.0)
    with pytest.raises(RecipeChanged, match=r"--allow-change train\.epochs"):
        stage.run(longer, run_dir)
    report = stage.run(longer, run_dir, allow_change=["train.epochs"])
    assert report.numbers["samples"] == 60
    assert [e["step"] for e in events(run_dir, "start")] == [0, 14]
    # One epoch more, not begun anew: each sample of it once.
    assert len({e["step"] for e in events(run_dir, "step")}) == report.numbers["steps"]
    assert len(events(run_dir, "step")) == report.numbers["steps"]
    assert stage.run(longer, run_dir).skipped


def test_an_unchanged_recipe_with_permission_is_the_same_training(fresh_run, monkeypatch):
    recipe, straight = fresh_run()
    stage.run(recipe, straight)
    _, run_dir = stopped_run(fresh_run, monkeypatch)
    stage.run(recipe, run_dir, allow_change=list(CHANGEABLE))
    assert_same_end(straight, run_dir)
    assert read_record(run_dir.checkpoints, "train").overrides == ()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.lerning_rate", "no such key. Did you mean train.learning_rate?"),
        ("learning_rate", "no such key. Did you mean train.learning_rate?"),
        ("lr", "no such key."),
        ("train.seed", "it determines the order of the samples"),
        ("train.optimizer", "the checkpoint holds the state of the other optimizer"),
        ("train.online", "it determines where the samples come from"),
        ("drafter.layers", "it determines the network"),
        ("corpus.sources", "it determines the data"),
        ("corpus.sources.0.path", "it determines the data"),
        ("target.path", "it determines the data"),
        ("extract.taps", "it determines the data"),
        ("regenerate.temperature", "it determines the data"),
        ("train.betas.1", "a part of train.betas, which changes as a whole"),
        ("train.objective.0.weight", "a part of train.objective, which changes as a whole"),
        ("train.threads", "it changes no result: set it, no permission is needed"),
        ("train", "a section. Name each of its keys"),
        ("score.budgets", "the training does not depend on it"),
        ("name", "the training does not depend on it"),
    ],
)
def test_t_74_a_key_that_cannot_change_is_refused_with_the_reason(fresh_run, key, said):
    with pytest.raises(RecipeError) as raised:
        require_changeable(["train.epochs", key])
    assert str(raised.value).startswith(f"--allow-change {key}: {said}")
    recipe, run_dir = fresh_run()
    with pytest.raises(RecipeError):
        stage.run(recipe, run_dir, allow_change=[key])
    assert not run_dir.checkpoints.exists()


def test_every_training_key_is_changeable_or_for_a_reason_not():
    keys = {f"train.{f.name}" for f in fields(TrainRecipe)}
    assert keys == {
        *CHANGEABLE,
        *WITHOUT_EFFECT,
        "train.seed",
        "train.shard_window",
        "train.optimizer",
        "train.online",
    }


@pytest.mark.parametrize(
    ("compute", "device", "resolved"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda:1", "bfloat16"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_auto_is_resolved_by_the_device(compute, device, resolved):
    assert resolved_compute(TrainRecipe(compute=compute, device=device)) == resolved


def test_auto_and_what_it_stands_for_are_the_same_training(fresh_run):
    recipe, run_dir = fresh_run()
    stage.run(recipe, run_dir)
    record = read_record(run_dir.checkpoints, "train")
    assert record.fields["train.compute"] == "float32"
    assert stage.run(changed(recipe, compute="float32"), run_dir).skipped
    require_train(recipe, run_dir)
    assert torch.get_default_dtype() is torch.float32
