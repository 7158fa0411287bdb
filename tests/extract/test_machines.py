"""Several machines on one store: each has a run directory of its own and does its part."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

from extract_runs import ROOMY, contents, make_run, make_sample, make_samples
from extract_trials import (
    bucket_of,
    manifest_bytes,
    objects,
    times_recorded,
    with_extract,
)
from paceline.cli.main import main
from paceline.durable.errors import Interrupted, UserError
from paceline.durable.store import LocalStore
from paceline.extract import setting, stage, work
from paceline.extract.sharing import KEY
from paceline.features.reader import FeatureReader
from paceline.status import run_status


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path, s3):
    """What a recipe says of the shared store: a folder that all mount, or a bucket."""
    if request.param == "folder":
        return {"store": str(tmp_path / "shared")}
    return {
        "store": s3.url(f"machines/{tmp_path.name}"),
        "store_options": s3.options,
        "staging": str(tmp_path / "staging"),
        **ROOMY,
    }


@pytest.fixture(autouse=True)
def credentials(s3):
    with s3.credentials():
        yield


def machines(tmp_path, target, count, place, samples=None, **extract):
    """Runs in `count` directories over the same corpus."""
    samples = make_samples(40) if samples is None else samples
    return [
        make_run(tmp_path / f"machine{n}", target, samples, **place, **extract)
        for n in range(1, count + 1)
    ]


def store_of(recipe, run_dir):
    if recipe.extract.store_options:
        return bucket_of(recipe, run_dir)
    (folder,) = Path(recipe.extract.store).iterdir()
    return LocalStore(folder)


def test_each_machine_does_its_part_and_the_last_one_publishes(tmp_path, target, place):
    count = 2 if place.get("store_options") else 3
    runs = machines(tmp_path, target, count, place)
    recipe, alone = make_run(tmp_path / "alone", target, make_samples(40))
    stage.run(with_extract(recipe, codec=_codec(place)), alone)
    reports = []
    there = set()
    for number, (recipe, run_dir) in enumerate(runs, start=1):
        reports.append(stage.run(recipe, run_dir, shard=f"{number}/{count}"))
        new = {unit_number(key) for key in objects(store_of(*runs[0]))} - there
        whole = range(reports[0].numbers["units"])
        assert new == set(whole[number - 1 :: count]), "its part, and no other"
        there |= new
    for (_, run_dir), report in list(zip(runs, reports, strict=True))[:-1]:
        assert not (run_dir.features / "manifest.json").exists()
        assert any("of the other parts are not in" in line for line in report.lines)
    assert any("no record of this run knew" in line for line in reports[-1].lines)
    last = manifest_bytes(runs[-1][1])
    for recipe, run_dir in runs[:-1]:
        report = stage.run(recipe, run_dir)
        assert not report.skipped
        assert report.numbers["units_of_earlier_runs"] == len(whole)
        assert manifest_bytes(run_dir) == last
        assert stage.run(recipe, run_dir).skipped
    store = store_of(*runs[0])
    assert store.get_range("manifest.json", 0, len(last)) == last
    # What several made is what one makes.
    assert objects(store) == {k: v for k, v in contents(alone.features).items() if "unit" in k}
    reader = FeatureReader(alone.features)
    for number, (recipe, run_dir) in enumerate(runs):
        other = FeatureReader(
            run_dir.features, options=recipe.extract.store_options, cache=tmp_path / f"c{number}"
        )
        assert other.sample_ids == reader.sample_ids
        assert torch.equal(other.read(7).taps, reader.read(7).taps)


def unit_number(key):
    return int(key.removeprefix("unit-").removesuffix(".safetensors"))


def _codec(place):
    return "planes" if place.get("store_options") else "none"


def test_machines_at_the_same_time_take_over_what_the_last_one_publishes(
    tmp_path, place, server, prepared
):
    runs = [prepared.copy(tmp_path / f"machine{number}", **place) for number in (1, 2, 3)]
    commands = [command for _, command in runs]
    server.log = tmp_path / "log"
    pids = [
        server.start(*command, "--shard", f"{number}/3")
        for number, command in enumerate(commands, start=1)
    ]
    assert [server.wait(pid) for pid in pids] == [0, 0, 0], server.log.read_text()
    assert [server.run(*command) for command in commands] == [0, 0, 0], server.log.read_text()
    assert len({manifest_bytes(run_dir) for run_dir, _ in runs}) == 1
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "staging").exists() or not list((tmp_path / "staging").iterdir())


def test_more_machines_than_shards(tmp_path, target, place):
    samples = [make_sample(n, 30) for n in range(2)]
    runs = machines(tmp_path, target, 3, place, samples, shard_bytes=30 * 192)
    reports = [stage.run(*run, shard=f"{n}/3") for n, run in enumerate(runs, start=1)]
    assert reports[0].numbers["units"] == 2
    # The second completed it; the third had nothing to make, and publishes all the same.
    assert "manifest" not in reports[0].numbers
    assert reports[1].numbers["manifest"] == reports[2].numbers["manifest"]


def test_a_part_that_is_done_is_told_as_such_and_not_as_dead(tmp_path, target, place, capsys):
    (recipe, run_dir), _ = machines(tmp_path, target, 2, place)
    stage.run(recipe, run_dir, shard="1/2")
    found = run_status(run_dir.root)
    status = next(s for s in found.stages if s.name == "extract")
    assert (found.state, status.state) == ("part done", "part done")
    assert status.detail.startswith("part 1/2 is done; ")
    assert status.counts.done == status.counts.total
    assert found.command == f"paceline extract --shard 1/2 --run {run_dir.root}"
    capsys.readouterr()
    assert main(["status", str(run_dir.root)]) == 0
    out = capsys.readouterr().out
    assert "part done" in out.splitlines()[0]
    assert f"`{found.command}` takes the whole over" in out
    assert main(["verify", str(run_dir.root)]) == 1
    out = capsys.readouterr().out
    assert f"`{found.command}` makes what is missing, bad or quarantined of part 1/2" in out
    assert main(["report", str(run_dir.root)]) == 0
    assert "other machines do the rest of extract." in run_dir.report.read_text()
    capsys.readouterr()
    assert main(["stop", str(run_dir.root)]) == 0
    assert capsys.readouterr().out.endswith(f"Go on with: {found.command}\n")


def test_on_a_machine_that_lacks_the_manifest_alone_all_is_verified(
    tmp_path, target, place, capsys
):
    (recipe, run_dir), other = machines(tmp_path, target, 2, place)
    stage.run(recipe, run_dir, shard="1/2")
    stage.run(*other, shard="2/2")
    capsys.readouterr()
    assert main(["verify", str(run_dir.root)]) == 0
    out = capsys.readouterr().out
    assert "All is verified." in out
    command = f"paceline extract --shard 1/2 --run {run_dir.root}"
    assert f"`{command}` takes over the one that another machine has published" in out
    stage.run(recipe, run_dir, shard="1/2")
    assert main(["verify", str(run_dir.root)]) == 0
    assert "not here yet" not in capsys.readouterr().out
    assert run_status(run_dir.root).part == ""


def test_a_part_is_known_from_the_first_event_on(tmp_path, target, place, monkeypatch):
    """Who is killed while it looks at what is there goes on with its part alone."""
    (recipe, run_dir), _ = machines(tmp_path, target, 2, place)

    def dies(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setting, "open_rows", dies)
        with pytest.raises(KeyboardInterrupt):
            stage.run(recipe, run_dir, shard="1/2")
    assert run_status(run_dir.root).part == "1/2"


def test_a_machine_that_is_killed_leaves_its_part_to_be_done_by_whoever_comes(
    tmp_path, target, place
):
    """The first machine stops in the middle; the second does it all without a part."""
    (one, first), (two, second) = machines(tmp_path, target, 2, place)
    original = work.Progress.add

    def stopping(self, index, times):
        original(self, index, times)
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work.Progress, "add", stopping)
        with pytest.raises(Interrupted):
            stage.run(one, first, shard="1/2")
    kept = times_recorded(first, "verified")
    report = stage.run(two, second)
    assert report.numbers["units_of_earlier_runs"] == len(kept)
    assert any("no record of this run knew" in line for line in report.lines)
    stage.run(one, first)
    assert manifest_bytes(first) == manifest_bytes(second)


def test_a_machine_of_other_code_is_refused_unless_that_is_accepted(
    tmp_path, target, place, monkeypatch
):
    (one, first), (two, second) = machines(tmp_path, target, 2, place)
    stage.run(one, first, shard="1/2")
    other = {**work.software(one.target), "torch": "0.0.1", "source": "f" * 16}
    monkeypatch.setattr(work, "software", lambda _: other)
    with pytest.raises(UserError, match=r"with other code \(source .* torch .* 0\.0\.1 here\)"):
        stage.run(two, second, shard="2/2")
    assert not times_recorded(second, "verified")
    assert objects(store_of(one, first), KEY)
    report = stage.run(two, second, shard="2/2", accept_code=True)
    assert "manifest" in report.numbers
    # What was accepted holds for all: the first machine is now the other one.
    monkeypatch.undo()
    store_of(one, first).delete(["unit-000000.safetensors"])
    with pytest.raises(UserError, match=r"torch 0\.0\.1 there"):
        stage.run(one, first, shard="1/2")


def test_a_part_without_a_shared_store_is_refused(tmp_path, target):
    recipe, run_dir = make_run(tmp_path, target, make_samples(5))
    with pytest.raises(UserError, match=r"--shard 1/2.*extract\.store"):
        stage.run(recipe, run_dir, shard="1/2")
    assert not run_dir.features.exists()


def test_what_one_machine_set_aside_the_others_take_over(tmp_path, broken_target, place):
    """A quarantined shard is told in the published manifest, which is in the store."""
    samples = [make_sample(n, 8) for n in range(12)]
    samples = [dataclasses.replace(s, input_ids=[i % 70 for i in s.input_ids]) for s in samples]
    samples[0].input_ids[3] = 77
    runs = machines(
        tmp_path, broken_target, 2, place, samples, shard_bytes=1536, allow_quarantined=1
    )
    (one, first), (two, second) = runs
    assert stage.run(one, first, shard="1/2").undone
    report = stage.run(two, second, shard="2/2")
    assert "manifest" not in report.numbers, "nobody but the first knows that it is set aside"
    report = stage.run(one, first)
    assert report.numbers["units_quarantined"] == 1
    report = stage.run(two, second, shard="2/2")
    assert manifest_bytes(second) == manifest_bytes(first)
    assert len(report.undone) == 1
    # Whoever allows none still does not take it for whole.
    strict = with_extract(two, allow_quarantined=0)
    assert "manifest" not in stage.run(strict, second, shard="2/2").numbers
