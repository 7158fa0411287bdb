"""`paceline plan` of an online training: both sides' memory and speed, and what averaging takes."""

from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT
from extract_runs import make_run, make_samples
from paceline.cli.main import main
from paceline.doctor.plan_machine import Gpu
from paceline.drafter.memory import CUDA_CONTEXT_BYTES, PROCESS_BYTES
from paceline.extract import stage as extract
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import StageRecord
from paceline.types import Split
from paceline.watch.events import EventWriter
from plan_worlds import GB, config_only, give_room, plan_recipe, planned, verdict
from tiny_models import tiny_model

RECIPE = ROOT / "recipes" / "dflash-ddtree-qwen3.6-27b.yaml"
FIVE, THREE = [f"cuda:{n}" for n in range(5)], [f"cuda:{n}" for n in range(5, 8)]
ROWS = ("--rows", "120000", "--mean-tokens", "1000")
MEASURED = ("--tokens-per-s", "4300", "--drafter-tokens-per-s", "6750")


@pytest.fixture(autouse=True)
def roomy(monkeypatch) -> None:
    give_room(monkeypatch, used=0, free=10**16)


@pytest.fixture
def gpus(monkeypatch) -> None:
    """Every GPU that is asked for is there, with 95 GB."""

    def there(wanted: list[str]) -> tuple[dict[str, Gpu], str]:
        return {name: Gpu(name="a GPU", total=95 * GB) for name in wanted}, ""

    monkeypatch.setattr("paceline.doctor.plan_machine._gpus", there)


def online(root: Path, **train: Any) -> Path:
    """A recipe for a target of 8 billion weights, of which there is the config alone."""
    target = config_only(root / "target")
    devices = {"target_devices": FIVE, "drafter_devices": THREE}
    return plan_recipe(
        root, target, target={"dtype": "bfloat16"}, train={"online": True, **devices, **train}
    )


def memory(plan: dict[str, Any], stage: str, device: str | None = None) -> dict[str, Any]:
    return next(m for m in plan["memory"] if m["stage"] == stage and device in (None, m["device"]))


def parts(listed: list[dict[str, Any]]) -> dict[str, int]:
    return {part["name"]: part["bytes"] for part in listed}


def test_the_store_has_the_validation_samples_and_the_rest_is_captured(tmp_path, gpus, capsys):
    plan = planned(capsys, online(tmp_path), *ROWS)
    everything = planned(capsys, online(tmp_path, online=False, target_devices=[]), *ROWS)
    # corpus.validation_fraction is 0.05.
    assert (plan["samples"]["count"], plan["online"]["samples"]["count"]) == (6000, 114_000)
    assert plan["samples"]["tokens"] + plan["online"]["samples"]["tokens"] == 120_000_000
    assert plan["store"]["total"] == pytest.approx(everything["store"]["total"] / 20, rel=1e-3)
    assert everything["online"] is None
    assert everything["samples"]["count"] == 120_000

    def corpus(of: dict[str, Any]) -> int:
        return next(p["bytes"] for s in of["file_systems"] for p in s["places"]
                    if p["what"] == "corpus")  # fmt: skip

    assert corpus(plan) == corpus(everything), "the corpus holds all of them"


def test_each_devices_memory_is_that_of_its_side(tmp_path, gpus, capsys):
    recipe = online(tmp_path, queue_bytes=7 * GB)
    plan = planned(capsys, recipe, *ROWS)
    drafting, capture = memory(plan, "train"), memory(plan, "capture")
    assert drafting["device"] == ", ".join(THREE)
    assert capture["device"] == ", ".join(FIVE)
    assert verdict(plan, "each of 3 GPUs in train")["needs"] == sum(
        parts(drafting["on_device"]).values()
    )
    assert verdict(plan, "each of 5 GPUs in capture")["has"] == 95 * GB
    assert "target weights" in parts(capture["on_device"])
    assert "drafter weights" not in parts(capture["on_device"])
    assert "target weights" not in parts(drafting["on_device"])
    assert "gradients" in parts(drafting["on_device"])
    # What both sides need of the host is one sum.
    assert capture["on_host"] == []
    host = parts(drafting["on_host"])
    assert host["features that wait"] == 7 * GB
    assert host["features on their way"] > 0
    assert sum(v["name"] == "memory in train" for v in plan["verdicts"]) == 1
    alone = parts(memory(planned(capsys, online(tmp_path, drafter_devices=["cuda:5"]), *ROWS),
                         "train")["on_host"])  # fmt: skip
    # The model, each drafter's weights, and a copy that is written.
    assert 3 * host["averaging on the host"] == 5 * alone["averaging on the host"]
    assert host["a checkpoint's bytes"] == 3 * alone["a checkpoint's bytes"]
    assert host["processes"] - alone["processes"] == 2 * 2_000_000_000


def test_a_device_that_does_both_holds_both(tmp_path, gpus, capsys):
    apart = planned(capsys, online(tmp_path), *ROWS)
    both = planned(capsys, online(tmp_path, drafter_devices=["cuda:4", "cuda:5"]), *ROWS, *MEASURED)
    shared = parts(memory(both, "train", "cuda:4")["on_device"])
    drafting = parts(memory(apart, "train")["on_device"])
    capture = parts(memory(apart, "capture")["on_device"])
    assert shared.pop("CUDA context") == 2 * CUDA_CONTEXT_BYTES
    assert shared == {k: v for k, v in (drafting | capture).items() if k != "CUDA context"}
    assert memory(both, "train", "cuda:5")["on_host"] == []
    assert memory(both, "capture")["device"] == ", ".join(FIVE[:4])
    assert both["online"]["best"] is None, "no split is told where a device is not one side's"


def test_on_the_cpu_all_of_it_is_the_hosts(tmp_path, capsys):
    devices = {"target_devices": ["cpu:0", "cpu:1"], "drafter_devices": ["cpu:0"]}
    plan = planned(capsys, online(tmp_path, **devices), *ROWS)
    train = memory(plan, "train")
    assert (train["device"], train["on_device"]) == ("cpu", [])
    host = parts(train["on_host"])
    # Two targets, a drafter, and the process that feeds it.
    assert host["processes"] == 4 * PROCESS_BYTES
    once = parts(memory(plan, "extract")["on_host"])["capture buffers"]
    assert host["capture buffers"] == 2 * once
    assert "target weights" in verdict(plan, "memory in train")["said"]


def test_the_slower_side_decides_and_the_best_split_is_proposed(tmp_path, gpus, capsys):
    even = {"target_devices": FIVE[:4], "drafter_devices": ["cuda:4", *THREE]}
    found = planned(capsys, online(tmp_path, epochs=2, **even), *ROWS, *MEASURED)["online"]
    assert found["slower"] == "targets"
    assert found["tokens"] == 2 * found["samples"]["tokens"]
    assert found["seconds"] == pytest.approx(found["tokens"] / (4 * 4300))
    assert found["best"] == {"targets": 5, "drafters": 3, "tokens_per_s": 3 * 6750}
    assert main(["plan", str(online(tmp_path, **even)), *ROWS, *MEASURED]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "targets 4 x 4,300 tokens/s" in shown
    assert "drafters 4 x 6,750 tokens/s" in shown
    assert "the targets are the slower side" in shown
    assert "5 targets and 3 drafters would be the fastest split of 8 devices alike, 20,250" in shown
    assert main(["plan", str(online(tmp_path)), *ROWS, *MEASURED]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the drafters are the slower side" in shown
    assert "5 targets and 3 drafters is the fastest split of 8 devices alike." in shown


def test_a_speed_that_is_not_known_makes_the_time_a_bound(tmp_path, gpus, capsys):
    found = planned(capsys, online(tmp_path), *ROWS, "--drafter-tokens-per-s", "1000")["online"]
    assert found["target_tokens_per_s"]["source"] == "unknown"
    assert (found["slower"], found["seconds"], found["best"]) == ("unknown", None, None)
    assert found["at_least"] == pytest.approx(found["tokens"] / 3000)
    assert main(["plan", str(online(tmp_path)), *ROWS]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "unknown: the speed of a drafter: nothing is measured here yet" in shown
    assert "time to train online unknown" in shown


def test_the_speeds_that_the_last_online_training_measured_are_taken(tmp_path, gpus, capsys):
    recipe = online(tmp_path)
    with EventWriter(RunDir(tmp_path / "run").events, "train") as events:
        (tmp_path / "run").mkdir()
        events.emit("step", target_rate=1.0, drafter_rate=None)
        events.emit("step", target_rate=4300.0, drafter_rate=6000.0)
        events.emit("finished", report={"target_rate": None, "drafter_rate": 6750.0})
        events.emit("failed", error="of the next one")
    found = planned(capsys, recipe, *ROWS)["online"]
    assert found["target_tokens_per_s"]["value"] == 4300
    assert found["target_tokens_per_s"]["source"] == "measured"
    assert found["drafter_tokens_per_s"]["value"] == 6750
    given = planned(capsys, recipe, *ROWS, "--tokens-per-s", "8", "--drafter-tokens-per-s", "9")
    assert given["online"]["target_tokens_per_s"]["value"] == 8
    assert given["online"]["drafter_tokens_per_s"]["value"] == 9


def test_one_of_several_devices_of_the_extraction_is_a_target(tmp_path, gpus, capsys):
    changes = ("--set", "target.devices=[0, 1, 2, 3]", "--tokens-per-s", "17200")
    found = planned(capsys, online(tmp_path), *ROWS, *changes)["online"]
    assert found["target_tokens_per_s"]["value"] == 4300
    assert "of 4 together" in found["target_tokens_per_s"]["said"]


def test_what_is_kept_takes_its_place_and_spares_the_targets(tmp_path, gpus, capsys):
    """Two epochs: the targets are slower, and needed for the first one alone."""
    rates = ("--tokens-per-s", "100", "--drafter-tokens-per-s", "1000")
    devices = {"target_devices": ["cuda:0"], "drafter_devices": ["cuda:1"], "epochs": 2}
    anew = planned(capsys, online(tmp_path, **devices), *ROWS, *rates)
    kept = planned(capsys, online(tmp_path, **devices, tee=True), *ROWS, *rates)
    tokens = kept["online"]["samples"]["tokens"]
    assert anew["online"]["seconds"] == pytest.approx(2 * tokens / 100)
    assert kept["online"]["seconds"] == pytest.approx(tokens / 100 + tokens / 1000)
    places = {p["what"]: p["bytes"] for f in kept["file_systems"] for p in f["places"]}
    share = places["kept features"] / places["features"]
    assert share == pytest.approx(tokens / kept["samples"]["tokens"], rel=0.01)
    names = [p["what"] for f in anew["file_systems"] for p in f["places"]]
    assert "kept features" not in names
    host = {p["name"]: p["bytes"] for s in kept["memory"] for p in s["on_host"]}
    assert host["features to be kept"] > 1 << 30


def test_a_drafters_speed_is_for_an_online_training_alone(tmp_path, capsys):
    recipe = online(tmp_path, online=False, target_devices=[], drafter_devices=[])
    assert main(["plan", str(recipe), *ROWS, "--drafter-tokens-per-s", "9"]) == 2
    assert "--drafter-tokens-per-s: only an online training is timed" in capsys.readouterr().err


def test_the_samples_of_a_corpus_are_counted_by_split(tmp_path, capsys):
    target = tiny_model("llama", tmp_path / "target", hidden=32)
    samples = make_samples(60)
    _, run_dir = make_run(tmp_path / "run", target, samples)
    record = StageRecord(run_dir.corpus, "prepare", {})
    record.begin()
    record.finish([run_dir.prepared], {})
    changes = {
        "extract": {"taps": [1, 3], "shard_bytes": 8192, "isolate": False},
        "regenerate": {"enabled": False},
    }
    recipe = plan_recipe(tmp_path, target, train={"online": True}, **changes)
    plan = planned(capsys, recipe)
    by_split = {
        split: [len(s.input_ids) for s in samples if s.split is split]
        for split in (Split.TRAIN, Split.VALIDATION)
    }
    for found, split in ((plan["samples"], Split.VALIDATION), (plan["online"]["samples"], "train")):
        lengths = by_split[Split(split)]
        assert (found["count"], found["tokens"]) == (len(lengths), sum(lengths))
        assert (found["longest"], found["basis"]) == (max(lengths), "corpus")
    assert plan["done"]["samples"] == 0
    extract.run(load_recipe(recipe), run_dir)
    after = planned(capsys, recipe)
    assert after["done"]["samples"] == after["samples"]["count"] == len(by_split[Split.VALIDATION])
    # Offline, that store is another extraction's.
    everything = plan_recipe(tmp_path, target, **changes)
    assert planned(capsys, everything)["done"]["samples"] == 0


@pytest.fixture
def big(tmp_path) -> Path:
    """The recipe of this repository, with a target of that shape of which there is the config."""
    target = config_only(
        tmp_path / "target", model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408,
        num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        vocab_size=248_320, max_position_embeddings=262_144,
    )  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.read_text().replace("models/Qwen3.6-27B", str(target)))
    return path


def test_the_big_recipe_fits_and_a_naive_average_would_not(big, gpus, capsys):
    plan = planned(capsys, big, *ROWS, "--tokens-per-s", "34400", *MEASURED[2:])
    drafter = plan["drafter"]
    assert drafter["fc_parameters"] == 131_072_000
    assert drafter["lm_head_parameters"] == 1_271_398_400
    assert drafter["frozen_parameters"] == 2 * 1_271_398_400
    assert plan["store"]["taps"] == [1, 16, 31, 46, 61]
    train = verdict(plan, "each of 3 GPUs in train")
    assert train["fits"] is True
    average = plan["averaging"]
    assert average["on_device"] == parts(memory(plan, "train")["on_device"])["averaging"] == 0
    assert average["naive"] == 4 * (drafter["parameters"] + drafter["frozen_parameters"])
    assert average["naive_fits"] is False
    assert average["device_bytes"] == train["has"] == 95 * GB
    assert train["needs"] < 95 * GB < train["needs"] + average["naive"]
    best = plan["online"]["best"]
    assert (best["targets"], best["drafters"]) == (5, 3)
    assert main(["plan", str(big), *ROWS]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "131,072,000 of them fc; frozen: lm_head 1,271,398,400" in shown
    assert "averaging: 0 bytes on a device" in shown
    assert "which does not fit beside the" in shown


def test_a_larger_device_has_room_for_a_naive_average(big, monkeypatch, capsys):
    def there(wanted: list[str]) -> tuple[dict[str, Gpu], str]:
        return {name: Gpu(name="a GPU", total=140 * GB) for name in wanted}, ""

    monkeypatch.setattr("paceline.doctor.plan_machine._gpus", there)
    assert planned(capsys, big, *ROWS)["averaging"]["naive_fits"] is True


def test_without_gpus_whether_a_naive_average_fits_is_not_known(big, monkeypatch, capsys):
    monkeypatch.setattr("paceline.doctor.plan_machine._gpus", lambda wanted: ({}, "none here"))
    average = planned(capsys, big, *ROWS)["averaging"]
    assert (average["naive_fits"], average["device_bytes"]) == (None, None)
    assert average["naive"] > 0


def test_a_checkpoint_has_an_optimizer_for_each_drafter(tmp_path, gpus, capsys):
    three = planned(capsys, online(tmp_path), *ROWS)["drafter"]
    one = planned(capsys, online(tmp_path, drafter_devices=["cuda:5"]), *ROWS)["drafter"]
    more = three["checkpoint_bytes"] - one["checkpoint_bytes"]
    assert more == pytest.approx(2 * 8 * one["parameters"], rel=1e-3)
    pushed = planned(capsys, online(tmp_path, outer_momentum=0.9), *ROWS)
    more = pushed["drafter"]["checkpoint_bytes"] - three["checkpoint_bytes"]
    assert more == 4 * one["parameters"]
    host = parts(memory(pushed, "train")["on_host"])
    assert host["averaging on the host"] == 4 * 6 * one["parameters"]
