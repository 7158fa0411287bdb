"""Targets compute while drafters train: every sample once, whoever dies."""

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from online_runs import DRAFTERS, TARGETS, children, consumption, toy_training
from paceline.cli import status
from paceline.durable.owner import owned
from paceline.extract import stage as extract_stage
from paceline.features.manifest import load
from paceline.flow.remote import RemotePolicy
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, TargetRecipe
from paceline.target.load import load_target
from paceline.train import averaged, loop, opening, stage
from paceline.types.sample import encode_sample, read_samples
from tiny_models import tiny_model
from training_runs import events, last_weights


@pytest.fixture
def online_run(world, tmp_path) -> Callable[..., tuple[Recipe, RunDir]]:
    """A run of its own whose store has the validation samples alone."""
    recipe, root, _ = world
    made = 0

    def make(*, targets: int = 1, **changes: object) -> tuple[Recipe, RunDir]:
        nonlocal made
        made += 1
        run = RunDir(tmp_path / f"online{made}")
        run.corpus.mkdir(parents=True)
        (run.corpus / "prepared.jsonl").write_bytes(RunDir(root).prepared.read_bytes())
        # Each process takes seconds to begin: as few as will do.
        train = replace(recipe.train, online=True, target_devices=TARGETS[:targets], **changes)
        asked = replace(recipe, train=train)
        extract_stage.run(asked, run)
        return asked, run

    return make


def test_the_store_has_the_validation_samples_alone(online_run):
    _, run = online_run()
    assert sum(len(unit.sample_ids) for unit in load(run.features).units) == 4


@pytest.mark.parametrize("drafters", [(), DRAFTERS])
def test_every_sample_of_every_epoch_is_consumed_once(online_run, drafters):
    recipe, run = online_run(targets=2, drafter_devices=drafters, sync_every=2)
    before = children()
    with consumption() as consumed:
        report = stage.run(recipe, run)
    assert set(consumed.values()) == {2}
    assert len(consumed) == 20
    assert report.numbers["samples"] == 40
    assert report.numbers["queue_peak_bytes"] > 0
    assert children() <= before


class Killed(BaseException):
    """The end of this process, as near as a test can come to it."""


def test_killed_in_the_middle_of_an_average_no_step_is_lost(online_run, monkeypatch):
    """What each drafter had is durable before it is averaged; the next start completes it."""
    recipe, run = online_run(drafter_devices=DRAFTERS, sync_every=2)
    original, calls = averaged.Outer.go, 0

    def dying(self, model, shares):
        nonlocal calls
        calls += 1
        if list(run.checkpoints.glob("*.unaveraged")):
            next(model.parameters()).data.fill_(9.0)
            raise Killed
        original(self, model, shares)

    with consumption() as consumed:
        with monkeypatch.context() as patched:
            patched.setattr(averaged.Outer, "go", dying)
            with pytest.raises(Killed):
                stage.run(recipe, run)
        (left,) = run.checkpoints.glob("*.unaveraged")
        step = int(left.name.removeprefix("step_").removesuffix(".unaveraged"))
        stage.run(recipe, run)
    assert calls > 1
    again = [e["step"] for e in events(run, "step")]
    assert again == sorted(set(again)), "no step is done twice"
    assert step in again
    assert set(consumed.values()) == {2}
    assert float(next(iter(last_weights(run).values())).max()) < 9.0


def test_a_drafter_that_dies_while_weights_are_averaged_takes_part_in_the_average(
    online_run, monkeypatch
):
    recipe, run = online_run(drafter_devices=DRAFTERS, sync_every=2)
    original, killed = averaged.Outer.go, []

    def killing_one(self, model, shares):
        if not killed and len(shares) == 2:
            pid = next(e["worker_pid"] for e in events(run, "worker") if "drafter" in e["name"])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        original(self, model, shares)

    monkeypatch.setattr(averaged.Outer, "go", killing_one)
    with consumption() as consumed:
        report = stage.run(recipe, run)
    assert killed
    assert set(consumed.values()) == {2}
    assert report.numbers["samples"] == 40


def test_a_sample_that_no_target_can_capture_is_set_aside_by_name(tmp_path):
    """Its token has no embedding that is a number; all others are trained on, and it is told."""
    folder = tiny_model("llama", tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][310] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    target = load_target(TargetRecipe(path=str(folder)))
    recipe, run = toy_training(
        target, tmp_path / "run", online=True, target_devices=TARGETS[:2], evaluations=1
    )
    samples = list(read_samples(run.prepared))
    samples[13].input_ids[9] = 310
    run.prepared.write_bytes(b"".join(map(encode_sample, samples)))
    extract_stage.run(recipe, run)
    with consumption() as consumed:
        report = stage.run(recipe, run)
    assert report.numbers["set_aside"] == 2
    assert report.numbers["samples"] == 40
    assert "2 samples were left out" in report.undone[0]
    assert samples[13].sample_id not in consumed
    assert set(consumed.values()) == {2}
    assert len(consumed) == 19
    told = events(run, "quarantined")
    assert [e["key"] for e in told] == [samples[13].sample_id] * 2
    assert all("not finite" in e["reason"] for e in told)
    again = stage.run(recipe, run)
    assert again.skipped
    assert again.undone == report.undone


def test_what_a_target_that_gives_up_had_in_hand_is_done_by_others(online_run, monkeypatch):
    """Its process is killed as soon as it has begun, and is not started any more."""
    monkeypatch.setattr(opening, "RemotePolicy", partial(RemotePolicy, restarts=0))
    tell = opening.Told.__call__

    def tell_and_kill(self, kind, fields):
        tell(self, kind, fields)
        if kind == "worker" and fields["what"] == "started" and fields["number"] == 0:
            os.kill(fields["pid"], signal.SIGKILL)

    monkeypatch.setattr(opening.Told, "__call__", tell_and_kill)
    recipe, run = online_run(targets=2)
    with consumption() as consumed:
        report = stage.run(recipe, run)
    told = [e["what"] for e in events(run, "worker") if e["name"].startswith("target 0")]
    assert told == ["started", "died", "gave_up"]
    assert set(consumed.values()) == {2}
    assert report.numbers["samples"] == 40
    assert report.numbers["worker_deaths"] == {"target 0 (cpu:0)": 1}


def test_later_epochs_read_what_the_first_one_has_kept(online_run):
    """The targets capture each sample once, and none is started for what is kept."""
    recipe, run = online_run(tee=True)
    said = []
    with consumption() as consumed, each_step(lambda: said.append(status_text(run))):
        report = stage.run(recipe, run)
        assert set(consumed.values()) == {2}
        more = replace(recipe, train=replace(recipe.train, epochs=4.0))
        before = len(events(run, "worker"))
        again = stage.run(more, run, allow_change=["train.epochs"])
    assert set(consumed.values()) == {4}
    tokens = {s.sample_id: len(s.input_ids) for s in read_samples(run.prepared)}
    assert report.numbers["captured_tokens"] == sum(tokens[i] for i in consumed)
    assert report.numbers["kept_samples"] == 20
    assert report.numbers["kept_bytes"] > 0
    assert "20 of 20 samples are kept" in "\n".join(report.lines)
    assert again.numbers["captured_tokens"] == 0
    assert len(events(run, "worker")) == before
    assert all("drafters wait" in text and "in the queue" in text for text in said)
    assert "20 samples are kept" in said[-1]


@contextmanager
def each_step(call: Callable[[], object]) -> Iterator[None]:
    """Behind each step that is told of."""
    original = loop.Trainer._report

    def report(self, *arguments):
        original(self, *arguments)
        call()

    loop.Trainer._report = report
    try:
        yield
    finally:
        loop.Trainer._report = original


def status_text(run: RunDir) -> str:
    shown = io.StringIO()
    with owned(run.root, "train"), redirect_stdout(shown):
        status.run(status.Args(run=run.root))
    return " ".join(shown.getvalue().split())
