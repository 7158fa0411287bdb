"""How a training ends: not before its epochs are over, not worse unsaid, not without a label."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from paceline.durable.errors import DataError, IntegrityError, Interrupted, RecipeError
from paceline.extract import stage as extract_stage
from paceline.recipe.checkpoints import CHOOSING, checkpoints
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import TrainRecipe
from paceline.recipe.stage import StageRecord, read_record
from paceline.train import checkpoint, loop, stage
from paceline.train.checkpoint import read_state, verify_checkpoint
from paceline.train.report import choice
from paceline.train.source import planned_samples
from paceline.types.sample import Sample, Split, encode_sample, read_samples
from training_runs import assert_same_end, contents, events, newest, stop_after


@pytest.fixture
def other_run(fresh_run, world, tmp_path) -> Callable[..., tuple]:
    """A run over the samples of the world, each changed; keywords replace train fields."""

    def make(change: Callable[[Sample], Sample | None], **train: object):
        recipe, _ = fresh_run(**train)
        run_dir = RunDir(tmp_path / "other")
        run_dir.corpus.mkdir(parents=True)
        changed: Iterable = map(change, read_samples(RunDir(world[1]).prepared))
        run_dir.prepared.write_bytes(b"".join(encode_sample(s) for s in changed if s is not None))
        extract_stage.run(recipe, run_dir)
        return recipe, run_dir

    return make


def with_epochs(recipe, epochs: float):
    return replace(recipe, train=replace(recipe.train, epochs=epochs))


def with_vocabulary(recipe, size: int):
    return replace(recipe, drafter=replace(recipe.drafter, draft_vocab=size))


@pytest.mark.parametrize(("epochs", "stop"), [(0.5, 7), (1.05, 7), (1.0, 14)])
def test_fewer_epochs_than_are_done_are_refused_and_nothing_is_touched(
    fresh_run, monkeypatch, epochs, stop
):
    """21 samples are done after 7 steps, all 40 after 14: there would be no end to measure."""
    recipe, run_dir = fresh_run()
    undo = stop_after(monkeypatch, stop)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    before = contents(run_dir.checkpoints)
    done = read_state(newest(run_dir)).samples
    with pytest.raises(RecipeError) as raised:
        stage.run(with_epochs(recipe, epochs), run_dir, allow_change=["train.epochs"])
    assert str(raised.value) == (
        f"train.epochs: {epochs:g} is over: {done} samples are done. Raise it, or --resume-from an "
        "earlier checkpoint."
    )
    assert contents(run_dir.checkpoints) == before
    assert not events(run_dir, "override")
    assert stage.run(recipe, run_dir).numbers["samples"] == 40, "the old epochs still go on"


def test_a_finished_training_is_not_cut_short_but_may_be_from_an_earlier_checkpoint(fresh_run):
    recipe, run_dir = fresh_run(keep_checkpoints=3)
    stage.run(recipe, run_dir)
    before = contents(run_dir.checkpoints)
    shorter = with_epochs(recipe, 1.5)
    with pytest.raises(RecipeError, match=r"train\.epochs: 1\.5 is over: 40 samples are done"):
        stage.run(shorter, run_dir, allow_change=["train.epochs"])
    assert contents(run_dir.checkpoints) == before
    report = stage.run(shorter, run_dir, allow_change=["train.epochs"], resume_from="step_000005")
    assert report.numbers["samples"] == 30
    assert read_state(newest(run_dir)).tau, "the end was evaluated"
    assert events(run_dir, "step")[-1]["learning_rate"] < 1e-4, "and the rate fell to it"
    # What was set aside lies behind the new end, and needs no override to be refused.
    with pytest.raises(RecipeError, match=r"train\.epochs: 1\.5 is over: 40 samples are done"):
        stage.run(shorter, run_dir, resume_from="step_000014.aside")


def test_the_end_of_its_own_epochs_is_finished_without_a_step(fresh_run):
    recipe, run_dir = fresh_run()
    first = stage.run(recipe, run_dir)
    (run_dir.checkpoints / "train.stage.json").unlink()
    again = stage.run(recipe, run_dir)
    # Of this process alone.
    peak = again.numbers["memory_peak"]
    assert again.numbers == {**first.numbers, "memory_peak": peak}
    assert len(events(run_dir, "step")) == 14


def test_the_epochs_of_a_plan_give_at_least_one_sample():
    assert [planned_samples(e, 20) for e in (2.0, 0.5, 0.01)] == [40, 10, 1]


def constant(sample: Sample) -> Sample:
    """Answers that are easy to guess."""
    return replace(sample, input_ids=[40 + i % 4 for i in range(len(sample.input_ids))])


@pytest.fixture
def skilled(other_run):
    """A run with easy answers, and a drafter that has learnt them."""
    recipe, run_dir = other_run(constant, learning_rate=1e-2, evaluations=1)
    report = stage.run(recipe, run_dir)
    folder = run_dir.checkpoints / report.numbers["best"]
    assert report.numbers["simulated_tau"][CHOOSING] > report.numbers["first_tau"][CHOOSING]
    assert not [line for line in report.lines if line.startswith("warning")]
    warm = replace(recipe, drafter=replace(recipe.drafter, warm_start=str(folder)))
    fresh = RunDir(run_dir.root.with_name("warm"))
    fresh.root.mkdir()
    for name in ("corpus", "features"):
        (fresh.root / name).symlink_to(run_dir.root / name)
    return replace(warm, train=replace(warm.train, learning_rate=10.0)), fresh, read_state(folder)


def test_a_training_that_makes_it_worse_says_so(skilled, monkeypatch):
    recipe, run_dir, source = skilled
    undo = stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    stopped = read_state(newest(run_dir))
    assert stopped.first_tau == source.tau
    report = stage.run(recipe, run_dir)
    assert read_state(newest(run_dir)).first_tau == source.tau, "a resumed training keeps it"
    assert report.numbers["first_tau"] == source.tau
    now = report.numbers["simulated_tau"][CHOOSING]
    assert now < source.tau[CHOOSING]
    assert report.lines[-1] == (
        f"warning: simulated τ ddtree-64 was {source.tau[CHOOSING]:.3f} before the first step and "
        f"is {now:.3f} at the best checkpoint: training made it worse. Lower train.learning_rate."
    )


def test_evaluations_on_other_anchors_are_not_compared_with_the_first(skilled, monkeypatch):
    recipe, run_dir, _ = skilled
    undo = stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    fewer = replace(recipe, train=replace(recipe.train, eval_anchors=2))
    report = stage.run(fewer, run_dir, allow_change=["train.eval_anchors"])
    assert report.numbers["simulated_tau"][CHOOSING] < report.numbers["first_tau"][CHOOSING]
    assert not [line for line in report.lines if "made it worse" in line]


def test_t_56_a_training_without_an_anchor_is_an_error_each_time(other_run):
    recipe, run_dir = other_run(
        lambda s: replace(s, loss_spans=[(len(s.input_ids) - 1, len(s.input_ids))])
    )
    for _ in range(2):
        with pytest.raises(DataError) as raised:
            stage.run(recipe, run_dir)
        told = str(raised.value)
        assert "none of the 40 samples trained on had a token to learn from" in told
        assert "`paceline prepare --preview`" in told
        assert "vocabulary" not in told
    record = read_record(run_dir.checkpoints, "train")
    assert record is not None
    assert record.outputs is None, "it never counts as done"
    assert len(events(run_dir, "step")) == 14
    assert events(run_dir, "failed")[-1]["refused"]


def test_a_vocabulary_without_any_of_the_answers_tokens_is_an_error(fresh_run):
    """The one token chosen is the end token, which this corpus does not have."""
    recipe, run_dir = fresh_run()
    with pytest.raises(DataError, match=r"draft vocabulary \(1 tokens, drafter\.draft_vocab\)"):
        stage.run(with_vocabulary(recipe, 1), run_dir)


def test_labels_are_counted_over_a_stop_too(fresh_run, monkeypatch):
    for size in (None, 60):
        recipe, straight = fresh_run()
        recipe = with_vocabulary(recipe, size)
        report = stage.run(recipe, straight)
        steps = events(straight, "step")
        counted = sum(s["right_count"] - s["outside"] for s in steps)
        assert report.numbers["labels"] == counted > 0
        _, stopped = fresh_run()
        undo = stop_after(monkeypatch, 6)
        with pytest.raises(Interrupted):
            stage.run(recipe, stopped)
        undo()
        assert stage.run(recipe, stopped).numbers["labels"] == counted
        assert_same_end(straight, stopped)


def test_a_checkpoint_from_before_there_was_such_a_count_goes_on(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run()
    undo = stop_after(monkeypatch, 13)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    folder = newest(run_dir)
    record = json.loads((folder / "state.json").read_bytes())
    del record["state"]["labels"], record["state"]["first_tau"]
    (folder / "state.json").write_text(json.dumps(record))
    sums = json.loads((folder / "checksums.json").read_bytes())
    sums["state.json"] = digest_file(folder / "state.json")
    (folder / "checksums.json").write_text(json.dumps(sums))
    report = stage.run(recipe, run_dir)
    last = events(run_dir, "step")[-1]
    assert report.numbers["labels"] == last["right_count"]
    assert report.numbers["first_tau"] == {}


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """How often the bytes of each checkpoint are read to prove them."""
    counter: Counter = Counter()
    original = checkpoint.check_sums

    def check(folder, names):
        counter[folder.name] += 1
        original(folder, names)

    monkeypatch.setattr(checkpoint, "check_sums", check)
    return counter


def test_checkpoints_are_read_when_a_training_starts_and_the_best_when_it_ends(
    fresh_run, monkeypatch, reads
):
    recipe, run_dir = fresh_run(evaluations=7, keep_checkpoints=2)
    undo = stop_after(monkeypatch, 9)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    assert not reads
    there = [f.name for f in checkpoints(run_dir.checkpoints)]
    assert len(there) >= 2
    report = stage.run(recipe, run_dir)
    assert reads == Counter(there) + Counter([report.numbers["best"]])
    reads.clear()
    assert stage.run(recipe, run_dir).skipped
    assert not reads


def test_a_best_checkpoint_that_rots_while_the_training_goes_on_is_noticed_at_its_end(
    fresh_run, monkeypatch, caplog
):
    recipe, straight = fresh_run(evaluations=7, keep_checkpoints=7)
    best = stage.run(recipe, straight).numbers["best"]
    _, run_dir = fresh_run()
    original = stage.best_checkpoint

    def spoiled(root, fingerprints):
        path = root / best / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return original(root, fingerprints)

    monkeypatch.setattr(stage, "best_checkpoint", spoiled)
    report = stage.run(recipe, run_dir)
    assert report.numbers["best"] != best
    damaged = run_dir.checkpoints / best / "model.safetensors"
    assert f"{damaged}: its checksum does not hold. It is left out of the choice" in caplog.text
    whole = {f.name: read_state(f).tau for f in checkpoints(run_dir.checkpoints) if f.name != best}
    assert report.numbers["simulated_tau"][CHOOSING] == max(t[CHOOSING] for t in whole.values())


def test_a_checkpoint_that_was_removed_by_hand_does_not_end_the_training(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(evaluations=7, keep_checkpoints=1)
    undo = stop_after(monkeypatch, 5)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    original = stage.KeptCheckpoints.add

    def add(self, folder, tau):
        for other in checkpoints(run_dir.checkpoints):
            if other != folder:
                shutil.rmtree(other)
        original(self, folder, tau)

    monkeypatch.setattr(stage.KeptCheckpoints, "add", add)
    assert stage.run(recipe, run_dir).numbers["best"] == "step_000014"


def test_the_plan_is_told_before_the_first_step_and_the_choice_at_the_end(
    fresh_run, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "paceline")
    recipe, run_dir = fresh_run()
    undo = stop_after(monkeypatch, 7)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    plan = (
        "14 steps over 40 samples (20 distinct), 0.0 M trainable parameters; evaluations before "
        "the first step and at steps 5, 9, 14; first slot right: share of first drafted tokens "
        "that are the answer's"
    )
    messages = [r.getMessage() for r in caplog.records]
    first = next(i for i, m in enumerate(messages) if m.startswith("step 0: "))
    assert plan in messages[:first]
    # Larger steps from here on: 21 samples are done in 7 steps, 19 are left for 5 of 4.
    bigger = replace(recipe, train=replace(recipe.train, batch_samples=4))
    report = stage.run(bigger, run_dir, allow_change=["train.batch_samples"])
    assert "12 steps over 40 samples" in caplog.text
    assert "evaluations at steps 9, 12;" in caplog.text
    assert [e["step"] for e in events(run_dir, "evaluation")] == [0, 5, 9, 12]
    best = run_dir.checkpoints / report.numbers["best"]
    tau = report.numbers["simulated_tau"]
    line = f"drafter: {best}, the best by simulated τ of ddtree-64 ("
    assert [m for m in report.lines if m.startswith(line) and f"64 {tau[CHOOSING]:.3f})" in m]
    assert stage.run(bigger, run_dir).lines == (choice(best, tau),)


def test_without_validation_samples_the_newest_is_the_drafter(other_run):
    recipe, run_dir = other_run(lambda s: s if s.split is Split.TRAIN else None)
    report = stage.run(recipe, run_dir)
    assert report.numbers["first_tau"] == report.numbers["simulated_tau"] == {}
    newest_one = run_dir.checkpoints / "step_000014"
    assert (
        f"drafter: {newest_one}, the newest: there are no validation samples to choose by"
        in report.lines
    )


def test_the_recipe_says_what_evaluations_choose():
    from paceline.recipe.write import field_docs

    assert f"simulated τ of {CHOOSING}" in field_docs(TrainRecipe)["evaluations"]


def test_a_checkpoint_of_another_training_is_never_the_best_one(fresh_run, monkeypatch, caplog):
    """It is whole, and says of itself that its τ is higher."""
    recipe, run_dir = fresh_run(evaluations=2)
    undo = stop_after(monkeypatch, 5)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    undo()
    own = {f.name for f in checkpoints(run_dir.checkpoints)}
    foreign = run_dir.checkpoints / "step_000001"
    shutil.copytree(checkpoints(run_dir.checkpoints)[0], foreign)
    state = json.loads((foreign / "state.json").read_text())
    state["state"] |= {"fingerprint": "another", "tau": {CHOOSING: 99.0}}
    (foreign / "state.json").write_text(json.dumps(state))
    sums = json.loads((foreign / "checksums.json").read_text())
    sums["state.json"] = digest_file(foreign / "state.json")
    (foreign / "checksums.json").write_text(json.dumps(sums))
    verify_checkpoint(foreign)
    report = stage.run(recipe, run_dir)
    assert report.numbers["best"] != foreign.name
    assert "step_000001: of another training" in caplog.text
    assert foreign.is_dir(), "what is not ours is not removed"
    assert own


@pytest.mark.parametrize("change", [{"learning_rate": 0.5}, {"gamma": 3.0}])
def test_a_change_that_could_act_on_nothing_is_refused(fresh_run, change):
    recipe, run_dir = fresh_run()
    stage.run(recipe, run_dir)
    before = contents(run_dir.checkpoints)
    other = replace(recipe, train=replace(recipe.train, **change))
    key = f"train.{next(iter(change))}"
    with pytest.raises(RecipeError, match=f"{key}: the training is at its end"):
        stage.run(other, run_dir, allow_change=[key])
    assert contents(run_dir.checkpoints) == before
    assert stage.run(recipe, run_dir).skipped


def test_a_training_whose_folder_was_removed_writes_nothing_there(fresh_run, monkeypatch):
    """Another run may have begun in its place."""
    recipe, run_dir = fresh_run(evaluations=3)
    original = loop.Trainer._advance

    def removing(self, *arguments):
        original(self, *arguments)
        if self.state.step == 1:
            shutil.rmtree(run_dir.checkpoints)
            run_dir.checkpoints.mkdir()
            StageRecord(run_dir.checkpoints, "train", {"another": "run"}).begin()

    monkeypatch.setattr(loop.Trainer, "_advance", removing)
    with pytest.raises(IntegrityError, match="removed or replaced while this command ran"):
        stage.run(recipe, run_dir)
    assert [p.name for p in run_dir.checkpoints.iterdir()] == ["train.stage.json"]
