import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from extract_runs import make_run, make_samples
from paceline.cli.main import main
from paceline.corpus.estimate import estimate_samples
from paceline.durable.object_store import ObjectStore
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.watch.events import Counts, EventWriter
from plan_worlds import GB, config_only, give_memory, give_room, plan_recipe, planned, verdict
from tiny_models import tiny_model
from tiny_run import tiny_project

T_47 = ("--rows", "120000", "--mean-tokens", "1000")


@pytest.fixture
def large(tmp_path) -> Path:
    """A recipe for a target of 8 billion weights, of which there is the config alone."""
    target = config_only(tmp_path / "target")
    return plan_recipe(
        tmp_path, target, target={"dtype": "bfloat16"}, extract={"num_taps": 3, "last": True}
    )


@pytest.fixture
def roomy(monkeypatch) -> None:
    give_room(monkeypatch, used=0, free=10**16)


def test_t_47_bytes_before_the_start(large, roomy, capsys):
    plan = planned(capsys, large, *T_47)
    store = plan["store"]
    assert store["bytes_per_token"] == 32_768
    assert store["bytes_per_sample"] == 32_768_000
    assert store["total"] == store["by_codec"]["none"]
    assert store["total"] == pytest.approx(120_000 * 1000 * 32_768, rel=0.01)
    assert main(["plan", str(large), *T_47]) == 0
    shown = capsys.readouterr().out
    assert "32,768 B" in shown
    assert "3.93 TB (3.58 TiB)" in shown


def test_what_is_not_known_is_said_to_be(large, roomy, capsys):
    plan = planned(capsys, large, *T_47, "--set", "extract.store=s3://bucket/prefix")
    assert plan["target_bytes"] is None
    assert verdict(plan, "memory in extract")["fits"] is None
    assert "target weights" in verdict(plan, "memory in extract")["said"]
    flow = plan["flow"]
    assert flow["tokens_per_s"]["source"] == flow["upload"]["source"] == "unknown"
    assert (flow["bottleneck"], flow["seconds"], flow["ends_at"]) == ("unknown", None, None)
    assert len(plan["unknown"]) == 3
    assert main(["plan", str(large), *T_47]) == 0
    shown = capsys.readouterr().out
    assert "unknown: the target's weights" in shown
    assert "unknown: the speed of the devices" in shown


def test_a_gpu_that_is_not_here_is_listed_and_not_judged(large, roomy, capsys):
    plan = planned(capsys, large, *T_47, "--set", "target.devices=[97, 98]")
    extract = verdict(plan, "each of 2 GPUs in extract")
    assert (extract["has"], extract["fits"]) == (None, None)
    assert extract["needs"] > 0
    assert any("what GPUs there are" in sentence for sentence in plan["unknown"])


def test_the_samples_of_the_corpus_are_counted(tmp_path, capsys):
    project = tiny_project(tmp_path)
    run = str(tmp_path / "run")
    # Answers are not written: the data's own are trained on.
    asked = ("--set", "regenerate.enabled=false", "--set", "corpus.min_loss_tokens=1")
    rows = [
        {"messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": "word " * (n + 1)},
        ]}
        for n in range(16)
    ]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["prepare", str(project), "--run", run, *asked]) == 0
    capsys.readouterr()
    estimate = estimate_samples(load_recipe(project, asked[1::2]))
    plan = planned(capsys, project, *asked)
    assert plan["samples"]["basis"] == "corpus"
    assert plan["samples"]["count"] == estimate.samples == 16
    assert plan["samples"]["tokens"] == estimate.tokens
    assert estimate.error == 0.0
    assert (estimate.rows, estimate.rows_counted, estimate.looked_at) == (16, True, 16)
    # Another recipe's corpus would be refused by the run.
    assert main(["plan", str(project), "--run", run, *asked, "--set", "corpus.seed=7"]) == 2
    assert "corpus.seed: 0 -> 7" in capsys.readouterr().err


def test_a_measured_store_is_within_one_percent_of_the_plan(tmp_path, capsys):
    """T-47's second half, over a real extraction."""
    from paceline.doctor.plan import make_plan
    from paceline.doctor.plan_bytes import Samples
    from paceline.doctor.plan_facts import Asked
    from paceline.extract import stage
    from paceline.types.rows import index_rows

    target = tiny_model("llama", tmp_path / "target", hidden=64)
    recipe, run_dir = make_run(
        tmp_path / "run", target, make_samples(60, longest=60), shard_bytes=60_000
    )
    rows = index_rows(run_dir.prepared, vocab_size=None, max_position=None)
    samples = Samples(
        count=len(rows), tokens=rows.tokens, longest=int(rows.lengths.max()), basis="corpus",
        said="",
    )  # fmt: skip
    plan = make_plan(recipe, run_dir, Asked(samples=samples, lengths=rows.lengths))
    stage.run(recipe, run_dir)
    written = [f.stat().st_size for f in run_dir.features.glob("unit-*.safetensors")]
    assert len(written) == plan.store.shards
    assert sum(written) == pytest.approx(plan.store.total, rel=0.01)
    assert max(written) <= plan.store.largest_shard
    # What has been written need not be written again, and the speed is known from its events.
    again = make_plan(recipe, run_dir, Asked(samples=samples, lengths=rows.lengths))
    features = [p for s in again.file_systems for p in s.places if p.what == "features"]
    assert features[0].needs < 0.01 * plan.store.total
    assert again.flow.tokens_per_s.source == "measured"
    assert again.flow.seconds is not None


def test_without_a_corpus_the_data_are_estimated_and_it_says_so(tmp_path, capsys):
    project = tiny_project(tmp_path)
    plan = planned(capsys, project)
    assert plan["samples"]["basis"] == "data"
    assert plan["samples"]["count"] == 16
    said = plan["samples"]["said"]
    assert "an estimate from 16 of 16 rows" in said
    assert "counted at regenerate.max_new_tokens" in said
    # With the answers at their longest no plan is too small.
    limit = load_recipe(project).regenerate.max_new_tokens
    assert plan["samples"]["tokens"] > 16 * limit


def test_an_estimate_of_a_part_of_the_rows_is_near_all_of_them(tmp_path, monkeypatch):
    target = tiny_model("llama", tmp_path / "target")
    recipe = load_recipe(
        plan_recipe(
            tmp_path,
            target,
            regenerate={"enabled": False},
            corpus={"max_length": 400, "min_loss_tokens": 2},
        )
    )
    with (tmp_path / "rows.jsonl").open("w") as file:
        for n in range(600):
            turns = [{"role": "user", "content": "q" * (n * 37 % 60 + 1)}]
            if n % 10:
                turns.append({"role": "assistant", "content": "a" * (n * 53 % 80 + 2)})
            file.write(json.dumps({"messages": turns}) + "\n" if n % 100 else "broken\n")
    whole = estimate_samples(recipe, look_at=1000)
    assert (whole.looked_at, whole.error) == (600, 0.0)
    part = estimate_samples(recipe, look_at=70)
    assert part.looked_at <= 70
    assert abs(part.tokens - whole.tokens) <= 1.5 * part.error * whole.tokens
    # A file too large to be read whole is looked at in places.
    monkeypatch.setattr("paceline.corpus.estimate._READ_WHOLE", 1000)
    places = estimate_samples(recipe, look_at=70)
    assert not places.rows_counted
    assert places.rows == pytest.approx(600, rel=0.1)
    assert abs(places.tokens - whole.tokens) <= 2 * places.error * whole.tokens


def test_data_of_which_nothing_is_accepted_are_refused(tmp_path, capsys):
    project = tiny_project(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n[]\n")
    assert main(["plan", str(project), "--run", str(tmp_path / "run")]) == 2
    assert "none of the 2 rows" in capsys.readouterr().err


def test_staging_that_is_too_small_names_the_smallest_that_works(large, roomy, capsys):
    s3 = ("--set", "extract.store=s3://bucket/prefix", "--set", "extract.codec=none")
    small = (*s3, "--set", "extract.staging_bytes=4000000")
    plan = planned(capsys, large, *T_47, *small, code=1)
    found = verdict(plan, "staging")
    smallest = plan["staging"]["smallest"]
    assert (found["needs"], found["has"], found["fits"]) == (smallest, 4_000_000, False)
    assert 64 << 20 <= smallest < 65 << 20
    assert f"extract.staging_bytes={smallest}" in found["advice"][0]
    assert (plan["flow"]["bottleneck"], plan["flow"]["seconds"]) == ("staging", None)
    fitting = (*s3, "--set", f"extract.staging_bytes={smallest}")
    assert verdict(planned(capsys, large, *T_47, *fitting), "staging")["fits"] is True
    assert main(["plan", str(large), *T_47, *small]) == 1
    shown = capsys.readouterr().out
    assert "it does not fit" in shown
    assert f"Would fit: extract.staging_bytes={smallest}" in " ".join(shown.split())


def test_a_sample_larger_than_a_shard_is_checked_against_the_staging(large, roomy, capsys):
    asked = (
        "--set", "extract.store=s3://bucket/prefix",
        "--set", "extract.shard_bytes=1000000",
        "--set", "corpus.max_length=8192",
        "--set", "extract.batch_tokens=8192",
        "--set", "extract.staging_bytes=200000000",
    )  # fmt: skip
    plan = planned(capsys, large, *T_47, *asked, code=1)
    found = verdict(plan, "staging")
    assert found["said"].startswith("the largest sample")
    assert found["needs"] > 8192 * 32_768
    # Shards are no help: one sample fills one. A shorter sample, or fewer states of it, is.
    assert not any("shard_bytes" in advice for advice in found["advice"])
    assert any(a.startswith("corpus.max_length=4096 (") for a in found["advice"])
    assert any(a.startswith("extract.num_taps=1 (") for a in found["advice"])


def test_a_disk_that_is_too_small_names_what_would_fit(large, monkeypatch, capsys):
    give_room(monkeypatch, used=0, free=3_600 * GB)
    plan = planned(capsys, large, *T_47, code=1)
    found = verdict(plan, "disk ")
    assert found["fits"] is False
    assert found["needs"] > found["has"] == 3_600 * GB - (1 << 30)
    assert found["said"].endswith("the room there but for the last 1.07 GB")
    advice = " | ".join(found["advice"])
    assert "extract.codec=planes (2.69 TB)" in advice
    assert "extract.num_taps=2 (3.00 TB)" in advice
    assert "extract.last=false (3.00 TB)" in advice
    assert "instead of 120,000" in advice
    # The advice is true.
    for change in ("extract.codec=planes", "extract.num_taps=2", "extract.last=false"):
        planned(capsys, large, *T_47, "--set", change)
    fitting = next(a for a in found["advice"] if "instead of" in a).split()[0].replace(",", "")
    planned(capsys, large, "--rows", fitting, "--mean-tokens", "1000")


def test_features_in_a_folder_may_fill_a_disk_whatever_the_marks_say(large, monkeypatch, capsys):
    give_room(monkeypatch, used=96_000 * GB, free=4_100 * GB)
    plan = planned(capsys, large, *T_47)
    [system] = plan["file_systems"]
    assert (system["below_mark"], system["needs_below_mark"]) == (None, 0)
    assert system["spare"] == 1 << 30
    found = verdict(plan, "disk ")
    assert found["fits"] is True
    # What an extraction leaves free is not there for it.
    give_room(monkeypatch, used=0, free=system["needs"] + (1 << 30) - 1)
    assert verdict(planned(capsys, large, *T_47, code=1), "disk ")["fits"] is False
    give_room(monkeypatch, used=0, free=system["needs"] + (1 << 30))
    planned(capsys, large, *T_47)


def test_staging_with_room_above_the_high_mark_alone_does_not_fit(large, monkeypatch, capsys):
    give_room(monkeypatch, used=500 * GB, free=500 * GB)
    s3 = (
        "--set",
        "extract.store=s3://bucket/prefix",
        "--set",
        "extract.staging_bytes=400000000000",
    )
    asked = (*T_47, *s3, "--set", f"extract.staging={large.parent / 'run' / 'staging'}")
    plan = planned(capsys, large, *asked, code=1)
    [system] = plan["file_systems"]
    assert system["spare"] == 0
    found = verdict(plan, "disk ")
    assert found["has"] == 300 * GB
    assert "extract.high_mark" in found["said"]
    mark = next(a for a in found["advice"] if a.startswith("extract.high_mark="))
    planned(capsys, large, *asked, "--set", mark)


def test_no_single_change_is_enough_and_several_are(large, monkeypatch, capsys):
    give_room(monkeypatch, used=0, free=600 * GB)
    plan = planned(capsys, large, *T_47, code=1)
    together = next(a for a in verdict(plan, "disk ")["advice"] if " together " in a)
    changes = together.partition(" together")[0].split(" and ")
    assert len(changes) > 1
    settings = [word for change in changes for word in ("--set", change)]
    planned(capsys, large, *T_47, *settings)


def test_paths_on_one_file_system_share_its_room(large, monkeypatch, capsys):
    give_room(monkeypatch, used=0, free=10**16)
    plan = planned(capsys, large, *T_47)
    [system] = plan["file_systems"]
    places = {p["what"]: p for p in system["places"]}
    assert {*places} == {"checkpoints", "records", "corpus", "features"}
    assert system["needs"] == sum(p["bytes"] for p in places.values())
    kept = load_recipe(large).train.keep_checkpoints
    one = plan["drafter"]["checkpoint_bytes"]
    assert places["checkpoints"]["bytes"] == (kept + 2) * one
    assert one == pytest.approx(12 * plan["drafter"]["parameters"], rel=0.001)


def test_memory_that_is_too_small_names_what_would_fit(large, roomy, monkeypatch, capsys):
    give_memory(monkeypatch, 41 * GB)
    plan = planned(capsys, large, *T_47, code=1)
    found = verdict(plan, "memory in train")
    assert found["needs"] > found["has"] == 41 * GB
    changes = [advice.partition(" (")[0] for advice in found["advice"]]
    keys = [change.partition("=")[0] for change in changes]
    assert keys == ["train.anchors", "drafter.layers"]
    for change in changes:
        again = planned(capsys, large, *T_47, "--set", change)
        assert verdict(again, "memory in train")["fits"] is True


def test_a_training_that_nothing_helps_says_so(large, roomy, monkeypatch, capsys):
    give_memory(monkeypatch, GB)
    plan = planned(capsys, large, *T_47, code=1)
    [said] = verdict(plan, "memory in train")["advice"]
    assert "no change of the recipe that was tried is enough" in said


def test_staging_in_memory_counts_as_memory(large, roomy, monkeypatch, capsys):
    monkeypatch.setattr("paceline.durable.space.is_tmpfs", lambda path: "shm" in str(path))
    s3 = ("--set", "extract.store=s3://bucket/prefix", "--set", "extract.staging=/dev/shm")
    give_memory(monkeypatch, 100 * GB)
    asked = (*T_47, *s3, "--set", f"extract.staging_bytes={500 * GB}")
    found = verdict(planned(capsys, large, *asked, code=1), "memory in extract")
    assert found["needs"] > 500 * GB
    assert found["fits"] is False
    assert any(a.startswith("extract.staging_bytes=") for a in found["advice"])
    assert any(a.startswith("extract.staging=") and "/run/staging" in a for a in found["advice"])
    on_disk = (*asked, "--set", f"extract.staging={large.parent / 'staging'}")
    assert verdict(planned(capsys, large, *on_disk), "memory in extract")["needs"] < 10 * GB


def test_a_target_in_memory_is_said_to_be_there(tmp_path, roomy, monkeypatch, capsys):
    project = tiny_project(tmp_path)
    monkeypatch.setattr("paceline.durable.space.is_tmpfs", lambda path: path.name == "target")
    plan = planned(capsys, project)
    assert plan["target_in_memory"] is True
    assert main(["plan", str(project), "--run", str(tmp_path / "run")]) == 0
    assert "memory: the target lies in memory" in capsys.readouterr().out


def test_the_text_has_all_that_a_plan_is_asked_for(tmp_path, roomy, monkeypatch, capsys):
    """Also of a stage that needs less than another one: whose memory it is stands nowhere else."""
    monkeypatch.setattr("paceline.durable.space.is_tmpfs", lambda path: "shm" in str(path))
    project = tiny_project(tmp_path)
    asked = (
        *("--set", "extract.store=s3://bucket/x", "--set", "extract.staging=/dev/shm"),
        *("--set", "extract.staging_bytes=4000000", "--set", "train.device=cuda:97"),
        *("--tokens-per-s", "1000", "--upload", "0.01"),
    )
    assert main(["plan", str(project), "--run", str(tmp_path / "run"), *asked]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for words in (
        *("a token 96 B", "a sample 3.30 kB", "all, codec none ", "all, codec planes (chosen) "),
        *("all, codec int8o ", "largest of ", "devices 1,000 tokens/s", "upload 10.00 kB/s"),
        *("time: the upload is the bottleneck; begun now, it ends 20", "disk ", " free."),
        *("staging: /dev/shm (memory), up to 4.00 MB", "staging: full after "),
        *("staging: the work goes on for ", "memory in extract: target weights ", "activations "),
        *("staging in memory 4.00 MB", "memory in regenerate: ", "memory in score: "),
        *("cuda:97 in train: drafter weights ", "AdamW moments ", "averaging 0 B"),
    ):
        assert words in shown, f"{words!r} is not in the plan"


JSON_KEYS = {
    "plan": "schema_version run target target_bytes target_in_memory samples done store staging "
    "flow online drafter averaging file_systems memory machine verdicts fits unknown",
    "samples": "count tokens longest basis said",
    "done": "shards samples tokens bytes",
    "store": "codec taps last dtype bytes_per_token bytes_per_sample shards largest_shard "
    "is_one_sample by_codec total",
    "staging": "path is_memory smallest smooth limit",
    "flow": "tokens_per_s upload made bottleneck seconds at_least ends_at staging_fills_after "
    "staging_lasts",
    "rate": "value source said",
    "online": "targets drafters samples tokens queue_bytes is_kept target_tokens_per_s "
    "drafter_tokens_per_s slower seconds at_least best",
    "split": "targets drafters tokens_per_s",
    "averaging": "on_device naive naive_fits device_bytes training",
    "drafter": "parameters fc_parameters lm_head_parameters frozen_parameters weight_bytes "
    "checkpoint_bytes",
    "file_system": "point device kind total free spare below_mark needs needs_below_mark places",
    "place": "what path bytes there is_estimate",
    "memory": "stage device on_device on_host",
    "part": "name bytes is_estimate",
    "machine": "host gpus without_gpus",
    "host": "total available",
    "verdict": "name needs has fits said advice",
}


def test_the_keys_of_the_json_are_frozen(large, roomy, capsys):
    """Scripts read them: add some, never rename or remove one within a version."""
    asked = (*T_47, "--set", "extract.store=s3://bucket/prefix", "--upload", "100")
    plan = planned(capsys, large, *asked)
    assert plan["online"] is plan["averaging"] is None
    devices = "train.target_devices=[cpu:0]", "train.drafter_devices=[cpu:1, cpu:2]"
    changes = [word for change in ("train.online=true", *devices) for word in ("--set", change)]
    rates = ("--tokens-per-s", "50", "--drafter-tokens-per-s", "70")
    online = planned(capsys, large, *T_47, *changes, *rates)
    found = {
        "plan": plan,
        "samples": plan["samples"],
        "done": plan["done"],
        "store": plan["store"],
        "staging": plan["staging"],
        "flow": plan["flow"],
        "rate": plan["flow"]["upload"],
        "online": online["online"],
        "split": online["online"]["best"],
        "drafter": plan["drafter"],
        "averaging": online["averaging"],
        "file_system": plan["file_systems"][0],
        "place": plan["file_systems"][0]["places"][0],
        "memory": plan["memory"][0],
        "part": plan["memory"][0]["on_host"][0],
        "machine": plan["machine"],
        "host": plan["machine"]["host"],
        "verdict": plan["verdicts"][0],
    }
    assert {name: " ".join(part) for name, part in found.items()} == JSON_KEYS
    assert plan["schema_version"] == 1
    assert [stage["stage"] for stage in plan["memory"]] == [
        "regenerate", "extract", "train", "score",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "5"), "--rows and --mean-tokens: give both"),
        (("--rows", "0", "--mean-tokens", "5"), "--rows: 0 is impossible"),
        (("--rows", "5", "--mean-tokens", "nan"), "--mean-tokens: nan is impossible"),
        (("--rows", "5", "--mean-tokens", "9999"), "corpus.max_length 2048"),
        (("--upload", "5"), "extract.store names a folder"),
        (("--probe",), "extract.store names a folder"),
        (("--probe", "--upload", "5"), "Leave one out"),
        ((*T_47, "--set", "extract.num_taps=40"), "extract.num_taps: 40 taps do not fit"),
        ((*T_47, "--set", "extract.shard_bytes=0"), "extract.shard_bytes: 0 is impossible"),
        ((*T_47, "--set", "extract.shards=1"), "extract.shards: unknown key"),
        ((*T_47, "--set", "target.path=/nowhere"), "target.path: /nowhere: no such folder"),
    ],
)
def test_what_is_impossible_exits_with_2(large, roomy, capsys, arguments, said):
    assert main(["plan", str(large), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_data_that_are_missing_exit_with_2(large, roomy, capsys):
    assert main(["plan", str(large)]) == 2
    assert "rows.jsonl: no such file" in capsys.readouterr().err


def test_a_run_that_has_a_recipe_needs_no_other(large, tmp_path, roomy, capsys):
    run = tmp_path / "run"
    run.mkdir()
    assert main(["plan", "--run", str(run), *T_47]) == 2
    assert "no recipe.yaml yet" in capsys.readouterr().err


def test_the_plan_writes_nothing(large, roomy, capsys):
    before = sorted(large.parent.rglob("*"))
    planned(capsys, large, *T_47, "--set", "extract.store=s3://bucket/prefix")
    assert sorted(large.parent.rglob("*")) == before


COLD = """
import sys
from paceline.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "tokenizers"} & sys.modules.keys())
sys.exit(f"imported {heavy}" if heavy else code)
"""


def cold(*arguments: str) -> tuple[dict, float]:
    """The plan of a process of its own, which must not load torch, and its processor seconds."""
    before = _seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", COLD, "plan", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    assert "imported" not in done.stderr
    return json.loads(done.stdout), _seconds_of_children() - before


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_million_samples_are_planned_in_five_seconds_without_torch(large):
    many = ("--rows", "1000000", "--mean-tokens", "1000", "--set", "corpus.max_length=2048")
    plan, seconds = cold(str(large), *many)
    assert plan["samples"]["count"] == 1_000_000
    assert seconds < 5
    # What does not fit is where most is worked out.
    assert verdict(plan, "disk ")["fits"] is False


def test_a_corpus_is_counted_without_torch(tmp_path):
    target = tiny_model("llama", tmp_path / "target")
    _, run_dir = make_run(tmp_path / "run", target, make_samples(30))
    path = plan_recipe(tmp_path, target, regenerate={"enabled": False})
    record_corpus(run_dir)
    plan, _ = cold(str(path), "--run", str(run_dir.root))
    assert plan["samples"]["basis"] == "corpus"


def record_corpus(run_dir: RunDir) -> None:
    """Let the samples in a run directory pass for what `prepare` has made."""
    from paceline.recipe.stage import StageRecord

    record = StageRecord(run_dir.corpus, "prepare", {}, binds=False)
    record.begin()
    record.finish([run_dir.prepared], {})


def test_the_speed_of_the_last_extraction_is_taken(large, roomy, capsys):
    run_dir = RunDir(large.parent / "run")
    run_dir.root.mkdir()
    with EventWriter(run_dir.events, "extract") as events:
        events.emit("progress", Counts(unit="samples", total=10, done=5, tokens=99, rate=1234.5))
        events.emit("finished", Counts(unit="samples", total=10, done=10, tokens=200))
    flow = planned(capsys, large, *T_47)["flow"]
    assert flow["tokens_per_s"]["value"] == 1234.5
    assert flow["tokens_per_s"]["source"] == "measured"
    assert flow["seconds"] == pytest.approx(120_000_000 / 1234.5)
    given = planned(capsys, large, *T_47, "--tokens-per-s", "5000")["flow"]
    assert given["tokens_per_s"] == {"value": 5000.0, "source": "given", "said": "given"}


def test_the_upload_is_measured_only_when_asked_and_leaves_nothing(large, roomy, s3, capsys):
    options = json.dumps(s3.options)
    store = (
        "--set",
        f"extract.store={s3.url('plan')}",
        "--set",
        f"extract.store_options={options}",
    )
    with s3.credentials():
        silent = planned(capsys, large, *T_47, *store)
        assert silent["flow"]["upload"]["source"] == "unknown"
        probed = planned(capsys, large, *T_47, *store, "--probe", "--tokens-per-s", "1e9")
        assert list(ObjectStore(s3.url("plan"), s3.options).list("")) == []
    upload = probed["flow"]["upload"]
    assert upload["source"] == "measured"
    assert upload["value"] > 0
    assert probed["flow"]["bottleneck"] == "upload"
