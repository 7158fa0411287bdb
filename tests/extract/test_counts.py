"""Read, captured and stored are counted apart: a gap between them is told, and is no success."""

from dataclasses import replace
from pathlib import Path

import pytest

from extract_runs import contents, make_run, make_sample, make_samples
from extract_trials import events_of
from paceline.extract import stage, work
from paceline.extract.job import UnitWork
from paceline.extract.telling import corpus_gaps
from paceline.extract.worker import open_worker
from paceline.recipe.schema import RegenerateRecipe
from paceline.recipe.stage import StageRecord
from paceline.target.spec import read_spec
from paceline.types import Split
from paceline.types.rows import index_rows

SHORT = 3
"""The unit that goes wrong."""


@pytest.fixture(params=["prepare", "regenerate"])
def recorded(request, tmp_path, target, samples):
    """A run whose corpus has 40 samples to extract and one held out, all of them recorded."""
    recipe, run_dir = make_run(
        tmp_path / "run", target, [*samples, make_sample(40, 9, split=Split.HELDOUT)]
    )
    fields, counts = {}, {"accepted": 41, "quarantined": 3}
    if request.param == "regenerate":
        run_dir.prepared.rename(run_dir.regenerated)
        recipe = replace(recipe, regenerate=RegenerateRecipe(enabled=True))
        fields = {"target": read_spec(target).identity}
        counts = {"prepared": 44, "answered": 40, "quarantined": 3, "heldout": 1}
    record = StageRecord(run_dir.corpus, request.param, fields)
    record.begin()
    record.finish([run_dir.samples(recipe)], counts)
    return recipe, run_dir, request.param


def test_a_corpus_of_as_many_samples_as_its_record_says_is_no_finding(recorded):
    recipe, run_dir, _ = recorded
    report = stage.run(recipe, run_dir)
    assert report.undone == ()
    assert report.numbers["gaps"] == []
    assert report.numbers["samples_read"] == 41
    assert report.numbers["samples_captured"] == report.numbers["samples"] == 40


def test_a_sample_that_the_corpus_has_lost_is_told_every_time(recorded, caplog):
    recipe, run_dir, name = recorded
    source = run_dir.samples(recipe)
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join(lines[:7] + lines[8:]))
    report = stage.run(recipe, run_dir)
    (gap,) = report.undone
    said = f"{source}: 40 samples were read, and `paceline {name}` recorded 41 written."
    assert gap.startswith(said)
    assert f"extract: {gap}" in caplog.messages, "before the hours that the work takes"
    assert any(line.startswith("of 40 samples read, 1 are held out") for line in report.lines)
    (finished,) = events_of(run_dir, "finished")
    assert finished["report"]["gaps"] == [gap]
    # What could be extracted is whole; that does not make the finding go away.
    again = stage.run(recipe, run_dir)
    assert again.skipped
    assert again.undone == (gap,)


def test_a_sample_in_none_of_the_counts_is_told(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path / "run", target, samples)
    setting, *_ = stage.open_setting(recipe, run_dir)
    rows = index_rows(setting.source, vocab_size=None, max_position=None)
    assert corpus_gaps(setting, rows) == []
    (gap,) = corpus_gaps(setting, replace(rows, read=rows.read + 1))
    assert "41 samples were read, and 40 are to be extracted or left out" in gap


def short_in_words(task, path, make):
    """All is made, and one is not counted."""
    made = make(task, path)
    return replace(made, info=replace(made.info, samples=made.info.samples - 1))


def short_in_deed(task, path, make):
    """A sample is left out, and neither checksum nor record shows it."""
    *batches, last = task.payload.batches
    batches = (*batches, last - 1) if last > 1 else tuple(batches)
    return make(replace(task, payload=UnitWork(task.payload.positions[:-1], batches)), path)


@pytest.mark.parametrize("how", [short_in_words, short_in_deed])
@pytest.mark.parametrize("place", ["the run's", "another"])
def test_a_worker_that_captures_fewer_samples_is_told_and_proven_at_the_next_start(
    tmp_path, target, monkeypatch, how, place
):
    def open_short(job, context):
        make = open_worker(job, context)

        def handle(task, path):
            return how(task, path, make) if task.index == SHORT else make(task, path)

        return handle

    samples = make_samples(40)
    recipe, whole = make_run(tmp_path / "whole", target, samples, shard_bytes=20_000)
    stage.run(recipe, whole)
    store = "" if place == "the run's" else str(tmp_path / "store")
    recipe, run_dir = make_run(tmp_path / "run", target, samples, shard_bytes=20_000, store=store)
    monkeypatch.setattr(work, "open_worker", open_short)
    report = stage.run(recipe, run_dir)
    key = f"unit-{SHORT:06d}.safetensors"
    (undone,) = report.undone
    assert key in undone
    if store and how is short_in_deed:
        assert "not of the plan's samples" in undone, "what is stored has been looked at"
    else:
        assert "and its worker counts" in undone
    assert report.numbers["samples_captured"] == 39
    assert report.numbers["units_missing"] == 1
    assert not (run_dir.features / "manifest.json").exists()
    (failed,) = events_of(run_dir, "failed")
    assert key in failed["error"]

    monkeypatch.undo()
    folder = run_dir.features if not store else next(Path(store).iterdir())
    before = (folder / key).stat().st_mtime_ns
    report = stage.run(recipe, run_dir)
    assert report.undone == ()
    assert report.numbers["units_redone"] == (how is short_in_deed)
    assert ((folder / key).stat().st_mtime_ns == before) is (how is short_in_words)
    shards = {k: v for k, v in contents(folder).items() if k.startswith("unit-")}
    assert shards == {k: v for k, v in contents(whole.features).items() if k.startswith("unit-")}
