"""An extraction into a bucket: what is there proves itself, whatever was lost on the way here."""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from extract_runs import contents, make_run, make_sample
from extract_trials import (
    bucket_of,
    events_of,
    manifest_bytes,
    objects,
    times_recorded,
    with_extract,
)
from fault_proxy import fault_proxy, lose_answer
from paceline.cli.main import main
from paceline.durable.errors import StoreFailed, UserError
from paceline.durable.object_store import PART_SIZE, ObjectStore
from paceline.durable.s3_admin import multipart_uploads
from paceline.durable.staging import staging_root
from paceline.extract import sharing, stage
from paceline.extract.slices import ALL
from paceline.extract.software import software
from paceline.features.reader import FeatureReader
from paceline.features.shard import Shard, write_shard
from paceline.recipe.extract_inputs import resolved_codec
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe
from paceline.recipe.write import adopt_recipe, write_recipe
from paceline.types import Features
from run_server import wait_until
from seaweed import READER
from tiny_models import tiny_model
from training_runs import last_weights


def bucket_of_owner(store, s3):
    """The same, asked without the proxy that is gone by now."""
    return ObjectStore(store.url, s3.options)


def run_without_rights(s3, recipe, run_dir):
    """As if the right to write were lost on the way: who never had it makes nothing at all."""
    for _ in range(2):
        assert not times_recorded(run_dir, "staged")
        with s3.credentials(READER), pytest.raises(StoreFailed, match="403") as refused:
            stage.run(recipe, run_dir)
        assert refused.value.exit_code == 1
        sharing.join(bucket_of(recipe, run_dir), software(recipe.target), ALL, accept_code=False)


def spoil(store, kind, key, scratch):
    """Put another object under the key."""
    data = objects(store, key)[key]
    path = scratch / key
    path.write_bytes(data)
    shard = Shard(path)
    match kind:
        case "zero":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(data[: len(data) // 2])
        case "other tokens":
            found = shard.features
            ids = (found.tokens.input_ids + 1) % 256
            tokens = dataclasses.replace(found.tokens, input_ids=ids)
            changed = Features(tokens, found.taps.clone(), found.last, found.layer_ids)
            write_shard(path, changed, fingerprint=shard.fingerprint, codec="planes")
        case "other fingerprint":
            write_shard(path, shard.features, fingerprint="0" * 32, codec="planes")
        case "gone":
            store.delete([key])
            return
    store.put(key, path)


REASONS = {
    "zero": "empty",
    "half": "torn or damaged",
    "other tokens": "not the one that was recorded",
    "other fingerprint": "made by another extraction (fingerprint 0000",
    "gone": "recorded as done, but gone",
}


@pytest.mark.parametrize("run_directory", ["kept", "lost"])
def test_t_43_in_a_bucket_what_is_not_proven_is_redone_and_reported(
    tmp_path, target, samples, bucket, run_directory
):
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket)
    stage.run(recipe, run_dir)
    store = bucket_of(recipe, run_dir)
    before, manifest = objects(store), manifest_bytes(run_dir)
    keys = {kind: f"unit-{n:06d}.safetensors" for n, kind in enumerate(REASONS, start=1)}
    for kind, key in keys.items():
        spoil(store, kind, key, tmp_path)
    reasons = dict(REASONS)
    if run_directory == "lost":
        shutil.rmtree(run_dir.root)
        recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket)
        reasons["other tokens"] = "not recorded, and made of other token ids than the corpus has"
        del reasons["gone"]
    report = stage.run(recipe, run_dir)
    assert objects(store) == before
    assert manifest_bytes(run_dir) == manifest
    for kind, reason in reasons.items():
        assert any(
            line.startswith(f"{keys[kind]} was redone: {reason}") for line in report.lines
        ), kind
    assert set(times_recorded(run_dir, "staged")) >= set(keys.values())
    assert report.numbers["units_of_earlier_runs"] == report.numbers["units"] - len(keys)
    assert report.numbers["units_redone"] == len(reasons)
    assert stage.run(recipe, run_dir).skipped


def test_a_sample_larger_than_a_shard_is_uploaded_in_parts(tmp_path, s3, bucket):
    """It is a unit of its own, and larger than one request may be."""
    target = tiny_model(
        "llama", tmp_path / "target", layers=5, hidden=1024, max_position_embeddings=2048
    )
    long = make_sample(1, PART_SIZE // (3 * 1024 * 2) + 200)
    samples = [make_sample(0, 20), long, make_sample(2, 30)]
    with fault_proxy(s3.port) as proxy:
        options = {"store_options": {**s3.options, "endpoint": proxy.endpoint}, "codec": "none"}
        recipe, run_dir = make_run(
            tmp_path / "run", target, samples, shard_bytes=1 << 20, **{**bucket, **options}
        )
        report = stage.run(recipe, run_dir)
        sent = {r.key.rpartition("/")[2] for r in proxy.seen if r.is_part}
    assert report.numbers["units"] == 3
    store = bucket_of(recipe, run_dir)
    there = {found.key: found.size for found in bucket_of_owner(store, s3).list("unit-")}
    assert {key for key, size in there.items() if size > PART_SIZE} == sent
    assert len(sent) == 1
    assert multipart_uploads(bucket_of_owner(store, s3)) == []
    recipe, alone = make_run(tmp_path / "alone", target, samples, shard_bytes=1 << 20, codec="none")
    stage.run(recipe, alone)
    assert objects(bucket_of_owner(store, s3)) == {
        key: data for key, data in contents(alone.features).items() if "unit" in key
    }


def test_a_lost_run_directory_costs_nothing_but_a_look_at_the_headers(
    tmp_path, target, samples, s3, bucket
):
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket)
    stage.run(recipe, run_dir)
    whole, manifest = objects(bucket_of(recipe, run_dir)), manifest_bytes(run_dir)
    shutil.rmtree(run_dir.root)
    with fault_proxy(s3.port) as proxy:
        options = {**bucket, "store_options": {**s3.options, "endpoint": proxy.endpoint}}
        recipe, run_dir = make_run(tmp_path / "another", target, samples, **options)
        report = stage.run(recipe, run_dir)
        written = [r.key for r in proxy.seen if r.method in ("PUT", "POST")]
    assert report.numbers["units_of_earlier_runs"] == len(whole)
    assert f"{len(whole)} shards that no record of this run knew were found whole" in str(
        report.lines
    )
    assert not times_recorded(run_dir, "staged")
    assert set(times_recorded(run_dir, "verified")) == set(whole)
    assert all(key.endswith("manifest.json") for key in written)
    assert main(["verify", str(run_dir.root)]) == 1, "through a proxy that is gone"
    # Where they were put is in the manifest, and through a proxy it is the same bucket.
    assert manifest_bytes(run_dir) == manifest
    adopt_recipe(with_extract(recipe, **bucket), run_dir)
    assert main(["verify", str(run_dir.root), "--deep"]) == 0
    assert stage.run(with_extract(recipe, **bucket), run_dir).skipped


def test_incident_killed_while_uploads_are_in_flight(tmp_path, s3, prepared, server, bucket):
    """What was staged is uploaded by the next start, not computed again."""
    with fault_proxy(s3.port, rule=held_back_from("unit-000004")) as proxy:
        options = {**bucket, "store_options": {**s3.options, "endpoint": proxy.endpoint}}
        run_dir, command = prepared.copy(
            tmp_path / "run", **options, staging_bytes=10 << 20, uploads=2
        )
        server.log = tmp_path / "log"
        pid = server.start(*command)
        journal = run_dir.features / "journal.jsonl"
        wait_until(
            lambda: journal.exists() and journal.read_bytes().count(b'"staged"') > 20,
            pid,
            "it had staged twenty shards",
        )
        os.killpg(pid, signal.SIGKILL)
        assert server.wait(pid) == -signal.SIGKILL
    staged, verified = (times_recorded(run_dir, kind) for kind in ("staged", "verified"))
    assert len(verified) <= 6
    waiting = set(staged) - set(verified)
    left = staging_root(Path(bucket["staging"]), run_dir.root) / "units"
    assert {path.name for path in left.glob("*.safetensors")} >= waiting
    direct = tmp_path / "direct.yaml"
    write_recipe(with_extract(prepared.recipe, **bucket), direct)
    again = ("extract", str(direct), "--run", str(run_dir.root))
    assert server.run(*again) == 0, server.log.read_text()
    said = server.log.read_text()
    assert "had been made and were on their way to the store" in said
    assert re.search(r"\d+ shards of an earlier start are whole: uploaded, not made again", said)
    again = times_recorded(run_dir, "staged")
    assert {key: again[key] for key in staged} == dict(staged), "none was staged a second time"
    assert set(times_recorded(run_dir, "verified").values()) == {1}
    assert not left.exists()
    (recovery,) = events_of(run_dir, "recovery")
    assert recovery["ending"] == "killed"


def held_back_from(name):
    """Uploads of this object and all later ones get no answer for long."""

    def rule(request, forward):
        key = request.key.rpartition("/")[2]
        if request.method == "PUT" and key >= name:
            time.sleep(20)
        return forward(request)

    return rule


def test_a_run_over_a_bucket_that_loses_answers_ends_like_any_other(
    tmp_path, target, samples, s3, bucket
):
    """Each upload's first answer is lost: nothing is made twice, nothing counts before its time."""
    lost = set()

    def losing(request, forward):
        if request.method == "PUT" and request.key not in lost:
            lost.add(request.key)
            return lose_answer(request, forward)
        return forward(request)

    with fault_proxy(s3.port, rule=losing) as proxy:
        options = {**bucket, "store_options": {**s3.options, "endpoint": proxy.endpoint}}
        recipe, run_dir = make_run(tmp_path / "run", target, samples, **options)
        report = stage.run(recipe, run_dir)
    assert len(lost) >= report.numbers["units"]
    clean, clean_dir = make_run(tmp_path / "clean", target, samples, codec="planes")
    stage.run(clean, clean_dir)
    kept = {k: v for k, v in contents(clean_dir.features).items() if k.startswith("unit-")}
    assert objects(bucket_of(with_extract(recipe, **bucket), run_dir)) == kept
    assert set(times_recorded(run_dir, "staged").values()) == {1}


@pytest.mark.parametrize("staging", ["kept", "lost"])
def test_a_bucket_that_refuses_keeps_what_is_made_for_the_next_start(
    tmp_path, target, samples, s3, bucket, staging
):
    """Shared memory is empty after a reboot: then it is made again."""
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket)
    run_without_rights(s3, recipe, run_dir)
    staged = times_recorded(run_dir, "staged")
    assert staged
    assert not times_recorded(run_dir, "verified")
    if staging == "lost":
        shutil.rmtree(bucket["staging"])
    report = stage.run(recipe, run_dir)
    assert "manifest" in report.numbers
    made = times_recorded(run_dir, "staged")
    assert {made[key] for key in staged} == {1 if staging == "kept" else 2}
    assert set(times_recorded(run_dir, "verified").values()) == {1}


def test_a_run_that_was_moved_leaves_no_staging_behind(tmp_path, target, samples, s3, bucket):
    """The folder's name follows from the run's path: what lies under the old one is removed."""
    recipe, run_dir = make_run(tmp_path / "run", target, samples, **bucket)
    recipe = with_extract(recipe, staging=str(run_dir.staging))
    run_without_rights(s3, recipe, run_dir)
    assert list(run_dir.staging.rglob("*.safetensors"))
    moved = RunDir(tmp_path / "moved")
    run_dir.root.rename(moved.root)
    # Elsewhere this time: the run's own place is only the fallback.
    assert "manifest" in stage.run(with_extract(recipe, **bucket), moved).numbers
    assert not moved.staging.exists() or not list(moved.staging.iterdir())


def test_another_store_is_refused_unless_the_shards_are_there(tmp_path, target, samples, bucket):
    """Nothing is gone, and a week of work is not begun again for a changed word."""
    recipe, run_dir = make_run(tmp_path / "run", target, samples)
    stage.run(recipe, run_dir)
    before = contents(run_dir.features)
    for place in ({"store": str(tmp_path / "other")}, bucket):
        moved = with_extract(recipe, codec="none", **place)
        for _ in range(2):
            with pytest.raises(UserError, match=r"29 shards .* are in .*run/features, and not in"):
                stage.run(moved, run_dir)
    assert {k: v for k, v in contents(run_dir.features).items() if "unit" in k} == {
        k: v for k, v in before.items() if "unit" in k
    }
    assert stage.run(recipe, run_dir).numbers["units_redone"] == 0
    # The run's own folder is where the run is.
    elsewhere = RunDir(tmp_path / "elsewhere")
    shutil.copytree(run_dir.root, elsewhere.root)
    (elsewhere.features / "unit-000003.safetensors").unlink()
    assert stage.run(recipe, elsewhere).numbers["units_redone"] == 1
    moved = with_extract(recipe, store=str(tmp_path / "other"))
    fingerprint = json.loads((run_dir.features / "extract.stage.json").read_bytes())["fingerprint"]
    copy = tmp_path / "other" / fingerprint
    copy.mkdir(parents=True)
    for path in run_dir.features.glob("unit-*"):
        shutil.copy(path, copy)
    report = stage.run(moved, run_dir)
    assert report.numbers["units_of_earlier_runs"] == report.numbers["units"] == 29


def test_what_a_killed_run_left_half_written_in_another_folder_is_removed(
    tmp_path, target, samples
):
    recipe, run_dir = make_run(tmp_path / "run", target, samples, store=str(tmp_path / "store"))
    stage.run(recipe, run_dir)
    (run_dir.features / "manifest.json").unlink()
    (folder,) = (tmp_path / "store").iterdir()
    own, others = "unit-000001.safetensors.999999999", f"unit-000002.safetensors.{'0' * 8}.99"
    for name in (own, others):
        (folder / f"{name}.partial").write_bytes(b"half")
    stage.run(recipe, run_dir)
    assert [path.name for path in folder.glob("*.partial")] == [f"{others}.partial"]


def test_codec_auto_is_planes_in_a_bucket_and_none_in_a_folder(tmp_path, target, samples, bucket):
    assert resolved_codec(ExtractRecipe(store="s3://b/p")) == "planes"
    stores = {}
    for name, place in (("bucket", bucket), ("folder", {"store": str(tmp_path / "folder")})):
        recipe, run_dir = make_run(tmp_path / name, target, samples, **place)
        stage.run(recipe, run_dir)
        stores[name] = FeatureReader(
            run_dir.features, options=recipe.extract.store_options, cache=tmp_path / "copies"
        )
    assert {name: s.manifest.codec for name, s in stores.items()} == {
        "bucket": "planes", "folder": "none",
    }  # fmt: skip
    assert stores["bucket"].sample_ids == stores["folder"].sample_ids
    for index in range(len(samples)):
        one, other = (store.read(index) for store in stores.values())
        assert torch.equal(one.taps, other.taps)
        assert torch.equal(one.last, other.last)
        assert torch.equal(one.tokens.loss_mask, other.tokens.loss_mask)


def test_a_training_from_a_bucket_is_the_one_from_a_folder(tmp_path, server, prepared, bucket):
    """The same codec in a folder and in a bucket: weights agree bit for bit.

    (With another codec the shards are others, and with them the order of an epoch.)
    """
    weights = []
    for name, place in (("folder", {"codec": "planes"}), ("bucket", bucket)):
        run_dir, command = prepared.copy(tmp_path / name, **place)
        server.log = tmp_path / f"{name}.log"
        assert server.run(*command) == 0, server.log.read_text()
        assert server.run("train", *command[1:]) == 0, server.log.read_text()
        weights.append(last_weights(run_dir))
        assert run_dir.shard_cache.exists() is (name == "bucket")
    one, other = weights
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
