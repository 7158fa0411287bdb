import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from extract_runs import contents, make_run, make_sample, make_samples
from paceline.durable.errors import DataError, RecipeChanged, RecipeError, UserError
from paceline.durable.journal import Journal, fold
from paceline.extract import stage, work
from paceline.features.reader import FeatureReader
from paceline.features.shard import Shard, write_shard
from paceline.target.load import load_target
from paceline.types import Features, Split
from paceline.types.sample import batch_of
from paceline.watch.words import bytes_text


def events(run_dir, kind):
    lines = (run_dir.events / "extract.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_sample_is_stored_as_the_target_computes_it(tmp_path, target, samples, dtype):
    recipe, run_dir = make_run(tmp_path, target, samples, dtype=dtype)
    report = stage.run(recipe, run_dir)
    assert not report.skipped
    reader = FeatureReader(run_dir.features)
    assert sorted(reader.sample_ids) == sorted(s.sample_id for s in samples)
    by_id = {s.sample_id: s for s in samples}
    model = load_target(recipe.target)
    for index in range(len(reader)):
        sample = by_id[reader.sample_ids[index]]
        found = reader.read(index)
        wanted = model.capture(batch_of([sample]), (1, 3), last=True)
        assert found.tokens.input_ids.tolist() == sample.input_ids
        assert found.tokens.loss_mask.tolist() == sample.loss_mask().tolist()
        assert reader.lengths[index] == len(sample.input_ids)
        assert reader.loss_tokens[index] == sample.num_loss_tokens
        assert found.last is not None
        assert wanted.last is not None
        assert found.taps.dtype == found.last.dtype == getattr(torch, dtype)
        tolerance = 1e-5 if dtype == "float32" else 2**-8
        for one, other in ((found.taps, wanted.taps), (found.last, wanted.last)):
            error = (one.float() - other).norm(dim=-1) / other.norm(dim=-1)
            assert error.max() < tolerance


def test_manifest_and_shards_carry_what_made_them(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples, last=False)
    report = stage.run(recipe, run_dir)
    manifest = FeatureReader(run_dir.features).manifest
    assert manifest.digest == report.numbers["manifest"]
    assert manifest.layer_ids == (1, 3)
    assert manifest.layer_convention == "output_after_layer"
    assert not manifest.last
    assert manifest.target_identity == load_target(recipe.target).spec.identity
    assert len(manifest.units) > 5
    for unit in manifest.units:
        shard = Shard(run_dir.features / unit.key)
        assert shard.fingerprint == manifest.fingerprint
        assert shard.sample_ids == unit.sample_ids
        assert shard.lengths == list(unit.lengths)
        assert shard.features.last is None


def test_heldout_samples_and_those_without_loss_are_left_out_and_counted(tmp_path, target):
    samples = [
        make_sample(0, 10),
        make_sample(1, 10, split=Split.HELDOUT),
        make_sample(2, 10, loss=0),
        make_sample(3, 10, split=Split.VALIDATION),
        make_sample(4, 10, split=Split.HELDOUT, loss=0),
    ]
    recipe, run_dir = make_run(tmp_path, target, samples)
    report = stage.run(recipe, run_dir)
    assert set(FeatureReader(run_dir.features).sample_ids) == {f"{n:032x}" for n in (0, 3)}
    counted = [report.numbers[k] for k in ("samples", "left_out_heldout", "left_out_without_loss")]
    assert counted == [2, 2, 1]
    assert any(
        "of 5 samples read, 2 are held out for the score and 1 have no answer" in line
        for line in report.lines
    )


def test_a_second_run_does_nothing(tmp_path, target, samples, monkeypatch):
    recipe, run_dir = make_run(tmp_path, target, samples)
    first = stage.run(recipe, run_dir)
    before = {p: p.stat().st_mtime_ns for p in run_dir.features.iterdir()}
    # Neither may matter: they do not change the content.
    other = dataclasses.replace(
        recipe, target=dataclasses.replace(recipe.target, workers=4, threads=2)
    )
    monkeypatch.setattr(work, "supervise", None)
    again = stage.run(other, run_dir)
    assert again.skipped
    assert again.numbers == first.numbers
    assert {p: p.stat().st_mtime_ns for p in run_dir.features.iterdir()} == before


def test_another_recipe_is_refused_with_the_difference(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples)
    stage.run(recipe, run_dir)
    before = contents(run_dir.features)
    other = dataclasses.replace(recipe, extract=dataclasses.replace(recipe.extract, taps=(1, 2)))
    with pytest.raises(RecipeChanged, match=r"extract\.layer_ids\.1: 3 -> 2"):
        stage.run(other, run_dir)
    make_run(tmp_path, target, samples[:-1])
    with pytest.raises(RecipeChanged, match="corpus: "):
        stage.run(recipe, run_dir)
    assert contents(run_dir.features) == before


def test_batch_tokens_changes_no_name_and_no_row(tmp_path, target, samples):
    stores = []
    for tokens in (1, 40, 4096):
        recipe, run_dir = make_run(tmp_path / str(tokens), target, samples, batch_tokens=tokens)
        stage.run(recipe, run_dir)
        stores.append(FeatureReader(run_dir.features))
    assert len({s.manifest.fingerprint for s in stores}) == 1
    assert len({s.sample_ids for s in stores}) == 1
    for index in range(len(stores[0])):
        one, *others = (s.read(index).taps.float() for s in stores)
        for other in others:
            assert ((one - other).norm() / one.norm()) < 1e-2


def spoil(kind, folder, key, model, samples):
    path = folder / key
    shard = Shard(path)
    if kind == "zero":
        path.write_bytes(b"")
    elif kind == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "other tokens":
        found = shard.features
        tokens = dataclasses.replace(found.tokens, input_ids=(found.tokens.input_ids + 1) % 256)
        changed = Features(tokens, found.taps.clone(), found.last, found.layer_ids)
        write_shard(path, changed, fingerprint=shard.fingerprint)
    elif kind == "other fingerprint":
        write_shard(path, shard.features, fingerprint="0" * 32)
    elif kind == "flip":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif kind == "gone":
        path.unlink()


REASONS = {
    "zero": "empty",
    "half": "torn or damaged",
    "other tokens": "not the one that was recorded",
    "other fingerprint": "made by another extraction (fingerprint 0000",
    "flip": "torn or damaged",
    "gone": "recorded as done, but gone",
}


@pytest.mark.parametrize("journal_kept", [True, False])
def test_t_43_what_is_not_proven_is_redone_and_reported(tmp_path, target, samples, journal_kept):
    recipe, run_dir = make_run(tmp_path, target, samples)
    stage.run(recipe, run_dir)
    before = contents(run_dir.features)
    model = load_target(recipe.target)
    keys = {kind: f"unit-{n:06d}.safetensors" for n, kind in enumerate(REASONS, start=1)}
    for kind, key in keys.items():
        spoil(kind, run_dir.features, key, model, samples)
    valid = run_dir.features / "unit-000000.safetensors"
    kept_since = valid.stat().st_mtime_ns
    reasons = dict(REASONS)
    if not journal_kept:
        journal = run_dir.features / "journal.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(lines[0])
        reasons["other tokens"] = "not recorded, and made of other token ids than the corpus has"
        del reasons["gone"]
    report = stage.run(recipe, run_dir)
    assert contents(run_dir.features) == before
    assert valid.stat().st_mtime_ns == kept_since, "a valid unit is not redone"
    for kind, reason in reasons.items():
        assert any(
            line.startswith(f"{keys[kind]} was redone: {reason}") for line in report.lines
        ), kind
    redone = {event["name"]: event["reason"] for event in events(run_dir, "redo")}
    assert keys["zero"] in redone
    # The whole ones are taken over, recorded or not.
    assert report.numbers["units_of_earlier_runs"] == report.numbers["units"] - len(keys)
    assert set(redone) == {keys[kind] for kind in reasons}
    assert report.numbers["units_redone"] == len(reasons)
    assert stage.run(recipe, run_dir).skipped


def test_files_of_no_plan_are_kept_and_told(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples)
    run_dir.features.mkdir(parents=True)
    foreign = run_dir.features / "unit-999999.safetensors"
    foreign.write_bytes(b"mine")
    report = stage.run(recipe, run_dir)
    assert foreign.read_bytes() == b"mine"
    assert "1 file of no shard of this plan, unit-999999.safetensors first; kept." in report.lines


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from extract_runs import make_run, make_samples
from paceline.extract import stage, work
if __name__ == "__main__":
    stage.run(*make_run(Path(sys.argv[2]), Path(sys.argv[3]), make_samples(300)))
"""


def test_one_worker_killed_and_restarted_makes_the_bytes_of_two_undisturbed(tmp_path, target):
    whole, whole_dir = make_run(tmp_path / "whole", target, make_samples(300), workers=2)
    stage.run(whole, whole_dir)
    run_root = tmp_path / "killed"
    recipe, run_dir = make_run(run_root, target, make_samples(300))
    journal = run_dir.features / "journal.jsonl"
    script = tmp_path / "run.py"
    script.write_text(RUN)
    seed = random.randrange(10**6)
    print("seed", seed)
    helpers = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, script, helpers, run_root, target],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = time.monotonic() + 100
    while not (journal.exists() and b'"verified"' in journal.read_bytes()):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run_dir.features / "manifest.json").exists(), "killed too late to prove anything"
    data = journal.read_bytes()
    acknowledged = [r for r in fold(data, journal).records if r["kind"] == "verified"]
    for record in acknowledged:
        path = run_dir.features / record["key"]
        assert path.stat().st_size == record["size"]
        Shard(path).verify()
    for path in run_dir.features.glob("unit-*.safetensors"):
        Shard(path).verify()
    stamps = {r["key"]: (run_dir.features / r["key"]).stat().st_mtime_ns for r in acknowledged}

    report = stage.run(recipe, run_dir)
    # One may have been whole and not yet recorded.
    assert report.numbers["units_of_earlier_runs"] - len(acknowledged) in (0, 1)
    assert acknowledged
    assert contents(run_dir.features) == contents(whole_dir.features)
    assert not list(run_dir.features.glob("*.partial"))
    for key, stamp in stamps.items():
        assert (run_dir.features / key).stat().st_mtime_ns == stamp


def test_two_extractions_into_one_folder_are_refused(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples)
    with (
        Journal(run_dir.features / "journal.jsonl"),
        pytest.raises(UserError, match="another process"),
    ):
        stage.run(recipe, run_dir)


def test_events_tell_the_run_and_its_progress_in_tokens(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples)
    report = stage.run(recipe, run_dir)
    tokens = sum(len(s.input_ids) for s in samples)
    (start,) = events(run_dir, "start")
    progress = events(run_dir, "progress")
    (finished,) = events(run_dir, "finished")
    assert (start["tokens_total"], start["tokens"], start["units_done"]) == (tokens, 0, 0)
    assert report.numbers["units"] == start["units"]
    done = [p["units_done"] for p in progress]
    assert sorted(set(done) | {0}) == list(range(start["units"] + 1))
    assert done == sorted(done)
    progress = [p for p in progress if p["units_done"]]
    assert (progress[-1]["tokens"], progress[-1]["done"]) == (tokens, len(samples))
    assert progress[-1]["eta"] == 0
    assert 0 < progress[-1]["rate"] == finished["rate"] == finished["report"]["tokens_per_s"]
    timed = next(p for p in progress if p["rate"] is not None)
    assert timed["eta"] == pytest.approx((tokens - timed["tokens"]) / timed["rate"], abs=0.06)
    assert finished["report"]["manifest"] == FeatureReader(run_dir.features).digest


def test_t_47_the_estimate_is_told_before_and_holds(tmp_path, target, caplog):
    caplog.set_level("INFO")
    recipe, run_dir = make_run(
        tmp_path, target, make_samples(150, longest=400), shard_bytes=1 << 20
    )
    report = stage.run(recipe, run_dir)
    size = sum(p.stat().st_size for p in run_dir.features.glob("*.safetensors"))
    assert report.numbers["bytes"] == size
    assert size == pytest.approx(report.numbers["bytes_estimated"], rel=0.01)
    (start,) = events(run_dir, "start")
    assert start["bytes_estimated"] == report.numbers["bytes_estimated"]
    assert start["bytes_per_token"] == 3 * 32 * 2
    assert f"about {bytes_text(start['bytes_estimated'])}" in caplog.text
    assert bytes_text(120_000_000 * 32_768) == "3.93 TB (3.58 TiB)"


def test_default_taps_are_resolved_and_recorded(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples, taps=None)
    recipe = dataclasses.replace(recipe, extract=dataclasses.replace(recipe.extract, num_taps=2))
    stage.run(recipe, run_dir)
    assert FeatureReader(run_dir.features).manifest.layer_ids == (1, 2)


@pytest.mark.parametrize("taps", [(4,), (1, 4), (3, 1), (1, 1), (-1,), (5,), ()])
def test_impossible_taps(tmp_path, target, samples, taps):
    recipe, run_dir = make_run(tmp_path, target, samples, taps=taps)
    with pytest.raises(RecipeError, match=r"extract\.taps"):
        stage.run(recipe, run_dir)
    assert not run_dir.features.exists()


def test_a_corpus_that_does_not_fit_the_target_is_refused_before_it_is_loaded(
    tmp_path, target, monkeypatch
):
    monkeypatch.setattr(work, "supervise", None)
    long = [make_sample(0, 10), make_sample(1, 513)]
    recipe, run_dir = make_run(tmp_path / "long", target, long)
    with pytest.raises(DataError, match=r"prepared\.jsonl, line 2 .*513 tokens.*takes 512"):
        stage.run(recipe, run_dir)
    wide = dataclasses.replace(make_sample(0, 3), input_ids=[1, 320, 2])
    recipe, run_dir = make_run(tmp_path / "wide", target, [wide])
    with pytest.raises(DataError, match=r"line 1 .*token ids from 1 to 320"):
        stage.run(recipe, run_dir)
    assert "320" in events(run_dir, "failed")[0]["error"]
    recipe, run_dir = make_run(tmp_path / "twice", target, [make_sample(0, 5)] * 2)
    with pytest.raises(DataError, match=r"line 2 .*came before"):
        stage.run(recipe, run_dir)
    held = [make_sample(0, 5, split=Split.HELDOUT)]
    recipe, run_dir = make_run(tmp_path / "held", target, held)
    with pytest.raises(DataError, match="1 are held out"):
        stage.run(recipe, run_dir)


def test_a_missing_corpus_is_named(tmp_path, target, samples):
    recipe, run_dir = make_run(tmp_path, target, samples)
    run_dir.prepared.unlink()
    with pytest.raises(DataError, match=r"prepared\.jsonl"):
        stage.run(recipe, run_dir)


def test_hidden_states_that_are_not_finite_name_sample_and_token(tmp_path, target):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in target.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    ids = [make_sample(n, 8) for n in range(10)]
    ids = [dataclasses.replace(s, input_ids=[i % 70 for i in s.input_ids]) for s in ids]
    ids[7].input_ids[3] = 77
    recipe, run_dir = make_run(tmp_path / "run", broken, ids)
    report = stage.run(recipe, run_dir)
    (undone,) = report.undone
    assert re.search(r"sample 0{31}7: .* not finite in float32", undone)
    assert "not finite" in events(run_dir, "quarantined")[0]["reason"]
    assert not (run_dir.features / "manifest.json").exists()
    # What is set aside is tried again, and allowed where the recipe says so.
    asked = dataclasses.replace(recipe.extract, allow_quarantined=1)
    report = stage.run(dataclasses.replace(recipe, extract=asked), run_dir)
    assert len(report.undone) == 1
    (aside,) = FeatureReader(run_dir.features).manifest.quarantined
    assert f"{7:032x}" in aside.sample_ids
    assert report.numbers["samples"] + report.numbers["quarantined_samples"] == len(ids)
    assert stage.run(dataclasses.replace(recipe, extract=asked), run_dir).skipped
    assert not stage.run(recipe, run_dir).skipped
