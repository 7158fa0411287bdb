import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from extract_runs import make_samples
from feature_runs import make_feature_run
from paceline.cli.main import main
from paceline.durable.owner import LOCK, owned
from unit_stores import flipped

WITHOUT_TORCH = """
import sys
from paceline.cli.main import main
code = main(sys.argv[1:])
sys.exit(f"imported torch" if "torch" in sys.modules else code)
"""


@pytest.fixture
def made(tmp_path):
    return make_feature_run(tmp_path / "run", make_samples(60))


def verify(made, *flags):
    return main(["verify", str(made.run_dir.root), *flags])


def test_a_whole_store_is_verified_without_torch(made):
    made.finish()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "verify", str(made.run_dir.root), "--deep"],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count = len(made.world.units)
    assert f"shards 0-{count - 1}  verified  60 samples" in done.stdout
    assert "All is verified." in done.stdout
    assert not (made.run_dir.root / LOCK).exists(), "only looks, and leaves no trace"


def test_what_is_missing_or_bad_is_named_with_its_samples(made, capsys, tmp_path):
    made.finish()
    made.world.path(2).unlink()
    made.world.path(4).write_bytes(b"mine")
    assert verify(made, "--ids", str(tmp_path / "ids")) == 1
    out = capsys.readouterr().out
    rows, units = made.world.rows, made.world.units
    gone, bad = (rows.sample_ids[units[i].start : units[i].stop] for i in (2, 4))
    assert "shard 2" in out
    assert gone[0] in out
    assert "(recorded as done, but gone)" in out
    assert "shard 4" in out
    assert bad[0] in out
    assert "(torn or damaged (4 of " in out
    assert f"verified: {len(units) - 2} of {len(units)} shards" in out
    assert "1 missing, 1 bad, 0 quarantined." in out
    assert f"`paceline extract --run {made.run_dir.root}` makes what is missing" in out
    assert (tmp_path / "ids").read_text().splitlines() == [*gone, *bad]
    assert f"{tmp_path / 'ids'}: {len(gone) + len(bad)} sample ids written.\n" in out


def test_ids_that_could_not_be_written_are_refused_before_anything_is_read(made, capsys, tmp_path):
    made.finish()
    made.manifest.write_bytes(b"{}")
    before = sorted(tmp_path.rglob("*"))
    assert verify(made, "--ids", str(tmp_path / "absent" / "ids")) == 2
    told = capsys.readouterr()
    assert f"{tmp_path / 'absent'} is no folder" in told.err
    assert told.out == ""
    assert verify(made, "--ids", str(tmp_path)) == 2
    assert f"--ids {tmp_path}: a folder" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_manifest_that_is_not_published_yet_is_no_error(made, capsys):
    made.write()
    assert verify(made) == 0
    out = capsys.readouterr().out
    assert "All is verified." in out
    assert f"not here yet: `paceline extract --run {made.run_dir.root}` takes over" in out
    assert verify(made, "--repair") == 0
    assert "published anew" in capsys.readouterr().out
    made.manifest.write_bytes(b"{}")
    assert verify(made) == 1
    assert "not here yet" not in capsys.readouterr().out


def test_everything_stands_in_the_json(made, capsys):
    made.write([0, 2])
    assert verify(made, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [(r["first"], r["last"], r["state"]) for r in told["ranges"]][:3] == [
        (0, 0, "verified"),
        (1, 1, "missing"),
        (2, 2, "verified"),
    ]
    units = made.world.units
    assert told["ranges"][1]["sample_ids"] == list(
        made.world.rows.sample_ids[units[1].start : units[1].stop]
    )
    assert told["ranges"][1]["samples"] == units[1].stop - units[1].start
    assert (told["units"], told["verified"], told["is_deep"]) == (len(units), 2, False)


def test_it_refuses_while_a_command_is_at_work(made, capsys):
    made.finish()
    with owned(made.run_dir.root, "paceline extract"):
        assert verify(made) == 2
        assert "`paceline extract` is at work here" in capsys.readouterr().err
        assert verify(made, "--repair") == 2
        assert "is at work in this run directory" in capsys.readouterr().err
    assert verify(made) == 0


def test_a_damaged_journal_is_mended_on_request_alone(made, capsys):
    made.finish()
    lines = made.journal.read_bytes().splitlines(keepends=True)
    made.journal.write_bytes(b"".join([lines[0], flipped(lines[1], 99), *lines[2:]]))
    damaged = made.journal.read_bytes()
    assert verify(made) == 1
    out = capsys.readouterr().out
    assert "problem: " in out
    assert "line 2 is unreadable" in out
    assert "the journal is not needed any more, and this run is in no danger." in out
    assert f"`paceline verify {made.run_dir.root} --repair` mends the journal" in out
    assert made.journal.read_bytes() == damaged
    assert verify(made, "--repair") == 0
    out = capsys.readouterr().out
    assert "written anew" in out
    assert "The damaged one is kept as journal.damaged-" in out
    (kept,) = made.run_dir.features.glob("journal.damaged-*.jsonl")
    assert kept.read_bytes() == damaged
    assert verify(made) == 0


def test_a_journal_that_an_unfinished_extraction_needs_is_not_called_harmless(made, capsys):
    made.write()
    lines = made.journal.read_bytes().splitlines(keepends=True)
    made.journal.write_bytes(b"".join([lines[0], flipped(lines[1], 99), *lines[2:]]))
    assert verify(made) == 1
    out = capsys.readouterr().out
    assert "line 2 is unreadable" in out
    assert "no danger" not in out
    assert "--repair` mends the journal" in out


def test_repair_leaves_bad_shards_to_the_extraction(made, capsys):
    made.finish()
    made.world.path(1).write_bytes(b"mine")
    made.manifest.write_bytes(b"{}")
    assert verify(made, "--repair") == 1
    out = capsys.readouterr().out
    assert made.world.path(1).read_bytes() == b"mine"
    assert made.manifest.read_bytes() == b"{}"
    assert "what is bad is left as it is until then." in out


def test_a_torn_manifest_is_published_anew(made, capsys):
    made.finish()
    whole = made.manifest.read_bytes()
    made.manifest.write_bytes(whole[: len(whole) // 2])
    assert verify(made) == 1
    assert "the manifest was damaged" in capsys.readouterr().out
    assert verify(made, "--repair") == 0
    assert made.manifest.read_bytes() == whole


def test_a_folder_without_an_extraction_is_refused(tmp_path, made, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    (made.run_dir.features / "extract.stage.json").unlink()
    assert verify(made) == 2
    assert "no extraction has begun here" in capsys.readouterr().err


def test_many_ranges_are_cut_short_in_the_text_alone(tmp_path, capsys):
    made = make_feature_run(tmp_path / "long", make_samples(300))
    made.write(range(0, len(made.world.units), 2))
    assert verify(made) == 1
    out = capsys.readouterr().out
    assert f"and {len(made.world.units) - 40} ranges more (--json has them)." in out
    assert verify(made, "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["ranges"]) == len(made.world.units)
