"""With `train.online` the store has the validation samples alone: on purpose, and not as a gap."""

import dataclasses

import pytest

from extract_runs import make_run, make_sample
from paceline.cli.main import main
from paceline.durable.errors import DataError, RecipeChanged
from paceline.extract import stage
from paceline.extract.inventory import look, open_subject, read_papers, take_inventory
from paceline.features.reader import FeatureReader
from paceline.recipe.schema import CorpusRecipe, SourceRecipe
from paceline.recipe.stage import StageRecord, read_record
from paceline.recipe.write import write_recipe
from paceline.types import Split

FIELD = "extract.samples"


def switched(recipe, *, online=True):
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, online=online))


@pytest.fixture
def run(tmp_path, target, samples):
    """A run of 40 samples and a held-out one, its corpus recorded, and both recipes for it."""
    heldout = make_sample(40, 9, split=Split.HELDOUT)
    recipe, run_dir = make_run(tmp_path / "run", target, [*samples, heldout])
    record = StageRecord(run_dir.corpus, "prepare", {})
    record.begin()
    record.finish([run_dir.prepared], {"accepted": 41, "quarantined": 0})
    source = SourceRecipe(path=str(tmp_path / "rows.jsonl"))
    return dataclasses.replace(recipe, corpus=CorpusRecipe(sources=(source,))), run_dir


def test_the_validation_samples_are_kept_and_the_others_counted(run, samples):
    recipe, run_dir = run
    report = stage.run(switched(recipe), run_dir)
    wanted = {s.sample_id for s in samples if s.split is Split.VALIDATION}
    assert set(FeatureReader(run_dir.features).sample_ids) == wanted
    assert len(wanted) == 8
    assert report.undone == ()
    assert report.numbers["gaps"] == []
    assert report.numbers["samples"] == report.numbers["samples_captured"] == 8
    assert report.numbers["samples_read"] == 41
    assert report.numbers["left_out_for_training"] == 32
    assert any(line.endswith("32 are captured while training.") for line in report.lines)
    assert stage.run(switched(recipe), run_dir).skipped


def test_the_fingerprint_says_so_only_there(run):
    recipe, run_dir = run
    _, plain, _ = stage.open_setting(recipe, run_dir)
    _, online, _ = stage.open_setting(switched(recipe), run_dir)
    assert plain.fingerprint != online.fingerprint
    plain.begin()
    record = read_record(run_dir.features, "extract")
    assert record is not None
    assert FIELD not in record.fields
    online.begin()
    record = read_record(run_dir.features, "extract")
    assert record is not None
    assert record.fields[FIELD] == "validation"


@pytest.mark.parametrize("online", [True, False])
def test_a_switch_on_a_finished_run_is_refused_with_the_difference(run, online):
    recipe, run_dir = run
    stage.run(switched(recipe, online=online), run_dir)
    with pytest.raises(RecipeChanged, match=r"extract.samples \(train.online decides\): .*vali"):
        stage.run(switched(recipe, online=not online), run_dir)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_the_inventory_misses_nothing(run, capsys, index):
    recipe, run_dir = run
    recipe = switched(recipe)
    write_recipe(recipe, run_dir.recipe)
    stage.run(recipe, run_dir)
    if index == "lost":
        (run_dir.features / "rows.index").unlink()
    subject = open_subject(run_dir)
    papers = read_papers(subject)
    found = take_inventory(subject, papers, look(subject, papers, deep=True), is_deep=True)
    assert found.is_whole
    assert (found.samples, found.verified_samples, found.samples_elsewhere) == (8, 8, 32)
    assert main(["verify", str(run_dir.root)]) == 0
    out = capsys.readouterr().out
    assert "8 of 8 samples" in out
    assert "32 training samples left out on purpose" in out
    assert "All is verified." in out


def test_an_extraction_of_everything_leaves_nothing_for_the_training(run, capsys):
    recipe, run_dir = run
    write_recipe(recipe, run_dir.recipe)
    report = stage.run(recipe, run_dir)
    assert report.numbers["left_out_for_training"] == 0
    assert not any("captured while training" in line for line in report.lines)
    assert main(["verify", str(run_dir.root)]) == 0
    assert "on purpose" not in capsys.readouterr().out


def test_without_a_validation_sample_nothing_is_begun(tmp_path, target):
    recipe, run_dir = make_run(tmp_path / "run", target, [make_sample(n, 9) for n in range(5)])
    with pytest.raises(DataError, match=r"a validation sample.*Raise corpus.validation_fraction"):
        stage.run(switched(recipe), run_dir)
    assert not list(run_dir.features.glob("unit-*"))


def test_a_half_done_extraction_goes_on_with_what_it_keeps(run):
    recipe, run_dir = run
    recipe = switched(recipe)
    stage.run(recipe, run_dir)
    first, *_ = sorted(run_dir.features.glob("unit-*"))
    first.unlink()
    report = stage.run(recipe, run_dir)
    assert report.undone == ()
    assert report.numbers["samples"] == 8
    assert report.numbers["units_redone"] == 1
