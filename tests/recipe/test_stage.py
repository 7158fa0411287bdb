"""The stage record: done is a statement about bytes, its own included."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.durable.errors import IntegrityError, RecipeChanged
from paceline.recipe.stage import StageRecord, changed_outputs, read_record

FIELDS = {"corpus.seed": 0, "train.epochs": 1.5, "train.eps": 1e-08, "name": "ä"}


def finished(folder) -> bytes:
    folder.mkdir(exist_ok=True)
    output = folder / "output"
    output.write_bytes(b"0123456789")
    record = StageRecord(folder, "train", FIELDS)
    record.begin()
    record.finish([output], {"best": "step_000026", "tau": {"chain": 1.25}, "steps": 26})
    return (folder / "train.stage.json").read_bytes()


def test_a_record_reads_back_as_it_was_written(tmp_path):
    finished(tmp_path)
    record = read_record(tmp_path, "train")
    assert record is not None
    assert record.fields == FIELDS
    assert record.report["best"] == "step_000026"
    assert changed_outputs(tmp_path, record) == []
    assert StageRecord(tmp_path, "train", FIELDS).is_done()
    assert read_record(tmp_path, "score") is None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_change_to_the_record_passes_for_the_record(tmp_path_factory, data):
    """Any byte replaced: found out, or what is read is what was written."""
    folder = tmp_path_factory.mktemp("record")
    written = finished(folder)
    wanted = read_record(folder, "train")
    at = data.draw(st.integers(0, len(written) - 1))
    byte = data.draw(st.integers(0, 255))
    (folder / "train.stage.json").write_bytes(written[:at] + bytes([byte]) + written[at + 1 :])
    try:
        found = read_record(folder, "train")
    except IntegrityError:
        return
    assert found is not None
    if found.checksum:
        assert found == wanted
    else:
        assert found.fields == FIELDS, "the fingerprint still covers the fields"


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_torn_record_is_refused(tmp_path, cut):
    written = finished(tmp_path)
    (tmp_path / "train.stage.json").write_bytes(written[:cut])
    with pytest.raises(
        IntegrityError, match=r"train\.stage\.json: .*Remove it and run `paceline train`"
    ):
        StageRecord(tmp_path, "train", FIELDS)


@pytest.mark.parametrize("harm", [b"", b"0123", b"0123456780", None])
def test_a_changed_output_makes_the_stage_undone(tmp_path, harm):
    finished(tmp_path)
    output = tmp_path / "output"
    output.unlink()
    if harm is not None:
        output.write_bytes(harm)
    assert not StageRecord(tmp_path, "train", FIELDS).is_done()


def test_other_fields_are_refused_with_each_difference(tmp_path):
    finished(tmp_path)
    with pytest.raises(RecipeChanged, match=r"corpus\.seed: 0 -> 3\n"):
        StageRecord(tmp_path, "train", FIELDS | {"corpus.seed": 3}).is_done()


def test_an_allowed_change_is_recorded_and_outlives_the_next_finish(tmp_path):
    before = finished(tmp_path)
    assert b'"overrides"' not in before, "a record that nobody changed reads as it always did"
    asked = FIELDS | {"train.epochs": 3.0}
    with pytest.raises(RecipeChanged, match=r"Or go on .*: `--allow-change train\.epochs`\."):
        StageRecord(tmp_path, "train", asked, changeable=["train.epochs"]).is_done()
    record = StageRecord(tmp_path, "train", asked, allowed=["train.epochs"])
    assert not record.is_done()
    record.begin(step=26)
    record.finish([tmp_path / "output"], {})
    stored = read_record(tmp_path, "train")
    assert stored is not None
    (override,) = stored.overrides
    assert (override.key, override.made, override.asked, override.step) == (
        "train.epochs", 1.5, 3.0, 26,
    )  # fmt: skip
    assert StageRecord(tmp_path, "train", asked).is_done()
    own = StageRecord(tmp_path, "train", asked).fingerprints
    assert own == {stored.fingerprint, override.fingerprint}


def test_an_override_in_the_record_cannot_be_changed_unseen(tmp_path):
    finished(tmp_path)
    StageRecord(tmp_path, "train", FIELDS | {"train.epochs": 3.0}, allowed=["train.epochs"]).begin(
        step=26
    )
    path = tmp_path / "train.stage.json"
    for old, new in ((b'"step": 26', b'"step": 27'), (b'"overrides"', b'"overrodes"')):
        written = path.read_bytes()
        assert old in written
        path.write_bytes(written.replace(old, new))
        with pytest.raises(IntegrityError):
            read_record(tmp_path, "train")
        path.write_bytes(written)


def test_beginning_removes_what_dead_processes_left(tmp_path):
    dead = tmp_path / "file.999999999.partial"
    dead.write_bytes(b"half")
    assert StageRecord(tmp_path, "train", FIELDS).begin() == [dead.name]
    assert not dead.exists()


def test_an_unfinished_stage_of_which_nothing_stands_binds_nobody(tmp_path):
    StageRecord(tmp_path, "train", FIELDS).begin()
    other = FIELDS | {"corpus.seed": 3}
    with pytest.raises(RecipeChanged):
        StageRecord(tmp_path, "train", other).is_done()
    free = StageRecord(tmp_path, "train", other, binds=False)
    assert not free.is_done()
    free.begin()
    assert read_record(tmp_path, "train").fields == other


def test_a_finished_stage_binds_all_the_same(tmp_path):
    finished(tmp_path)
    with pytest.raises(RecipeChanged):
        StageRecord(tmp_path, "train", FIELDS | {"corpus.seed": 3}, binds=False).is_done()


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_record_that_was_removed_is_not_finished(tmp_path, begun_anew):
    """Somebody removed the folder while the stage worked, and another run may be in it."""
    record = StageRecord(tmp_path, "train", FIELDS)
    record.begin()
    record.require_claim()
    (tmp_path / "train.stage.json").unlink()
    if begun_anew:
        StageRecord(tmp_path, "train", FIELDS).begin()
    output = tmp_path / "output"
    output.write_text("x")
    with pytest.raises(IntegrityError, match="removed or replaced while this command ran"):
        record.finish([output], {})
    assert (tmp_path / "train.stage.json").exists() == begun_anew
