import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import foreign_caches as caches
from extract_runs import ROOMY, contents, make_run, make_samples
from paceline.durable.errors import DataError, RecipeChanged, TargetError, UserError
from paceline.durable.journal import fold
from paceline.extract import stage
from paceline.extract.foreign import ImportRequest, import_features
from paceline.extract.foreign_layers import Stated
from paceline.extract.stage import open_setting
from tiny_models import tiny_model

SAMPLES = make_samples(24)
LAYERS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("target") / "llama", layers=LAYERS)


def run_of(folder: Path, target: Path, **options):
    """A run with its corpus, worked on in this very process."""
    options = {"taps": (1, 4), **options}
    recipe, run_dir = make_run(folder, target, SAMPLES, **options)
    extract = dataclasses.replace(recipe.extract, isolate=False)
    return dataclasses.replace(recipe, extract=extract), run_dir


@pytest.fixture(scope="module")
def states(target, tmp_path_factory):
    return caches.true_states(*run_of(tmp_path_factory.mktemp("states"), target))


@pytest.fixture(scope="module")
def extracted(target, tmp_path_factory):
    """What `paceline extract` makes of taps 1 and 4, and of 2 and 4."""
    made = {}
    for taps in ((1, 4), (2, 4)):
        recipe, run_dir = run_of(tmp_path_factory.mktemp("extracted"), target, taps=taps)
        stage.run(recipe, run_dir)
        made[taps] = contents(run_dir.features)
    return made


def imported(run, source: Path, tool="specforge", *, check=2, **stated):
    recipe, run_dir = run
    request = ImportRequest(source=source, tool=tool, stated=Stated(**stated), check=check)
    return import_features(recipe, run_dir, request)


def journal(run_dir) -> list[dict]:
    path = run_dir.features / "journal.jsonl"
    return [dict(record) for record in fold(path.read_bytes(), path).records]


def files_add_up(numbers) -> bool:
    kinds = ("files_used", "files_already", "files_left", "files_duplicate", "files_unmatched")
    unreadable = sum(numbers["files_unreadable"].values())
    return numbers["files_read"] == sum(numbers[kind] for kind in kinds) + unreadable


WHOLE = {
    "specforge": ((1, 4), lambda root, all_: caches.write_specforge(root, all_), {}),
    "specforge in padded batches, compressed": (
        (1, 4),
        lambda root, all_: caches.write_specforge(root, all_, batch=5, compressed=True),
        {},
    ),
    "specforge un-normed": (
        (1, 4),
        lambda root, all_: [
            caches.write_specforge(root / str(n), [one], last=one.un_normed)
            for n, one in enumerate(all_)
        ],
        {"last": "un-normed"},
    ),
    "specforge DFlash": (
        (1, 4),
        lambda root, all_: caches.write_specforge_dflash(root, all_, (0, 1, 2, 4)),
        {"layers": (0, 1, 2, 4)},
    ),
    "speculators": ((1, 4), lambda root, all_: caches.write_speculators(root, all_), {}),
    "speculators, ids of the last layer given": (
        (1, 4),
        lambda root, all_: caches.write_speculators(root, all_, (2, 3, 5, 7)),
        {"layers": (2, 3, 5, 7, LAYERS)},
    ),
    "speculators .pt": ((2, 4), lambda root, all_: caches.write_speculators_pt(root, all_), {}),
}


def as_written(folder):
    """Files and what would show a change; reading may set the time of the last access."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for path, s in found.items()}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_import_is_what_extract_makes_bit_for_bit(
    name, target, states, extracted, tmp_path
):
    taps, write, stated = WHOLE[name]
    write(tmp_path / "cache", states)
    before = as_written(tmp_path / "cache")
    run = run_of(tmp_path / "run", target, taps=taps)
    report = imported(run, tmp_path / "cache", name.partition(" ")[0].strip(","), **stated)
    assert report.undone == ()
    assert report.numbers["units_left"] == 0
    assert report.numbers["samples_imported"] == len(SAMPLES)
    assert report.numbers["files_used"] == len(SAMPLES)
    assert files_add_up(report.numbers)
    assert [line for line in report.lines if "is the same bit for bit" in line] or (
        [line for line in report.lines if "is the same within rounding" in line]
    )
    records = journal(run[1])
    assert [r["kind"] for r in records[1:-1]] == ["verified"] * report.numbers["units"]
    assert records[0]["software"]["states"].startswith("imported from spec")
    assert records[-1]["how"] == "finished"
    completed = stage.run(*run)
    assert completed.numbers["units_of_earlier_runs"] == report.numbers["units"]
    assert completed.numbers["units_redone"] == 0
    assert contents(run[1].features) == extracted[taps]
    assert as_written(tmp_path / "cache") == before
    assert imported(run, tmp_path / "cache").skipped


def test_worker_processes_do_the_same(target, states, extracted, tmp_path):
    recipe, run_dir = run_of(tmp_path / "run", target)
    recipe = dataclasses.replace(
        recipe, extract=dataclasses.replace(recipe.extract, isolate=True, unit_retries=1)
    )
    cache = caches.write_speculators(tmp_path / "cache", states)
    damaged = cache / "hs_3.safetensors"
    tensors = load_file(damaged)
    tensors["hidden_states"][0, 0, 0] = float("inf")
    save_file(tensors, damaged)
    report = imported((recipe, run_dir), cache, "speculators", check=0)
    assert report.numbers["files_unreadable"] == {"cannot be used after all": 1}
    assert "hs_3.safetensors: states that are not finite" in report.undone[0]
    assert report.numbers["units_left"] == 1
    assert files_add_up(report.numbers)
    assert "quarantined" not in {record["kind"] for record in journal(run_dir)}
    stage.run(*run_of(tmp_path / "run", target))
    assert contents(run_dir.features) == extracted[1, 4]


def test_what_the_cache_lacks_is_left_to_extract(target, states, extracted, tmp_path):
    run = run_of(tmp_path / "run", target)
    half = caches.write_specforge(tmp_path / "half", [s for n, s in enumerate(states) if n % 9])
    report = imported(run, half)
    numbers = report.numbers
    assert 0 < numbers["units_left"] < numbers["units"]
    assert numbers["units_imported"] == numbers["units"] - numbers["units_left"]
    assert numbers["files_left"] > 0
    assert files_add_up(numbers)
    assert report.undone == ()
    assert f"`paceline extract --run {run[1].root}` makes" in report.lines[-1]
    assert not (run[1].features / "manifest.json").exists()

    whole = caches.write_specforge(tmp_path / "whole", states)
    again = imported(run, whole).numbers
    assert again["units_before"] == numbers["units_imported"]
    assert again["units_imported"] == numbers["units_left"]
    assert (again["files_used"] + again["files_already"], again["files_left"]) == (len(states), 0)
    assert files_add_up(again)
    once_more = imported(run, whole)
    assert once_more.numbers["units_imported"] == 0
    assert once_more.undone == ()

    other = run_of(tmp_path / "other", target)
    imported(other, half)
    stage.run(*other)
    assert contents(other[1].features) == extracted[1, 4]


def test_an_import_that_was_killed_goes_on(target, states, extracted, tmp_path):
    cache = caches.write_specforge(tmp_path / "cache", states)
    run = run_of(tmp_path / "run", target)
    whole = imported(run, cache).numbers["units"]
    path = run[1].features / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    (run[1].features / "unit-000001.safetensors").write_bytes(b"torn")
    for key in range(6, whole):
        (run[1].features / f"unit-{key:06d}.safetensors").unlink()
    again = imported(run, cache).numbers
    # Those that no record knows any more are proven by the corpus, and taken.
    assert again["units_before"] == 5
    assert again["units_imported"] == whole - 5
    stage.run(*run)
    assert contents(run[1].features) == extracted[1, 4]


def nothing_is_recorded(run_dir) -> bool:
    names = {path.name for path in run_dir.features.iterdir()}
    assert (run_dir.features / "journal.jsonl").read_bytes() == b""
    return names == {"journal.jsonl", "rows.index"}


def wrong(run, source: Path, tool: str, **stated) -> str:
    with pytest.raises(TargetError) as refused:
        imported(run, source, tool, **stated)
    assert "Nothing was imported." in str(refused.value)
    assert nothing_is_recorded(run[1])
    return str(refused.value)


def test_a_layer_off_by_one_is_caught_and_named(target, states, tmp_path):
    run = run_of(tmp_path / "run", target, taps=(2, 4))
    cache = caches.write_speculators(tmp_path / "cache", states, (2, 4, 5))
    message = wrong(run, cache, "speculators", convention="output-after")
    assert "They are the outputs after layers 1, 3, 4, and the last one is before" in message
    assert "Give `--layers 2,4,5 --convention input-of --last un-normed`." in message
    with pytest.raises(UserError, match=r"the cache has none of 2: .* the outputs after 1, 3, 4"):
        imported(run, cache, "speculators")

    other = caches.write_specforge(tmp_path / "other", states, (2, 4, 5))
    message = wrong(run, other, "specforge", layers=(1, 2, 4))
    assert "They are the outputs after layers 2, 4, 5" in message
    assert "Give `--layers 2,4,5 --convention output-after --last normed`." in message
    assert imported(run, other, layers=(2, 4, 5)).undone == ()


def test_a_last_state_that_is_not_what_it_is_said_to_be_is_named(target, states, tmp_path):
    run = run_of(tmp_path / "run", target)
    cache = caches.write_speculators(tmp_path / "cache", states)
    message = wrong(run, cache, "speculators", last="normed")
    assert "the last one is before the norm. Give " in message
    assert "--last un-normed`" in message
    cache = caches.write_specforge(tmp_path / "other", states)
    message = wrong(run, cache, "specforge", last="un-normed")
    assert "the last one is after the norm" in message
    assert "--last normed`" in message
    for number, one in enumerate(states):
        caches.write_specforge(tmp_path / f"third/{number}", [one], last=one.normed.flip(1))
    message = wrong(run, tmp_path / "third", "specforge")
    assert "the last one is neither before nor after" in message
    assert "--last absent`. That serves a run that does not keep extract.last" in message


def test_a_last_state_that_the_run_does_not_keep_does_not_matter(target, states, tmp_path):
    for number, one in enumerate(states):
        caches.write_specforge(tmp_path / f"cache/{number}", [one], last=one.normed.flip(1))
    assert imported(run_of(tmp_path / "run", target, last=False), tmp_path / "cache").undone == ()


def test_another_target_is_told_from_a_coarser_type_and_from_single_bad_tokens(
    target, states, tmp_path
):
    run = run_of(tmp_path / "run", target)
    rng = torch.Generator().manual_seed(0)

    def noisy(values: torch.Tensor, size: float) -> torch.Tensor:
        noise = torch.randn(values.shape, generator=rng)
        scale = values.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        return values + size * noise * scale

    def cache(name: str, size: float) -> Path:
        made = [
            dataclasses.replace(s, layers=noisy(s.layers, size), normed=noisy(s.normed, size))
            for s in states
        ]
        return caches.write_specforge(tmp_path / name, made)

    message = wrong(run, cache("coarse", 0.03), "specforge")
    assert "They are the outputs after layers 1, 3, 4, and the last one is after" in message
    assert "The target computes in float32 here (target.dtype)" in message
    assert "Give `" not in message
    assert "made with other weights" in wrong(run, cache("other", 1.5), "specforge")

    for one in states:
        one = dataclasses.replace(one, layers=one.layers.clone())
        one.layers[0] += 1.0
        caches.write_specforge(tmp_path / "few" / one.sample_id, [one])
    message = wrong(run, tmp_path / "few", "specforge")
    assert "1 of " in message
    assert "the flags are right and those tokens are not" in message


class Evil:
    """What a pickle can do to those who load it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_malicious_pickle_is_refused_by_name_and_does_nothing(target, states, tmp_path):
    run, mark = run_of(tmp_path / "run", target), tmp_path / "it was run"
    cache = caches.write_specforge(tmp_path / "cache", states)
    content = caches.specforge_content(states[0], (1, 3, 4))
    torch.save({**content, "more": Evil(mark)}, cache / "rows_0-7" / "data_2.ckpt")
    (cache / "rows_0-7" / "data_900.ckpt").write_bytes(__import__("pickle").dumps(Evil(mark)))
    torch.save({**content, "a": Evil}, cache / "rows_0-7" / "data_901.ckpt")
    report = imported(run, cache)
    assert not mark.exists()
    assert report.numbers["files_unreadable"] == {
        "asks for more than plain tensors": 2,
        "not of the format": 1,
    }
    names = " ".join(report.undone)
    assert "rows_0-7/data_2.ckpt: posix.system; nothing of it was run" in names
    assert "data_900.ckpt" in names
    assert "test_foreign.Evil" in names
    assert report.numbers["units_left"] == 1
    assert files_add_up(report.numbers)


def test_files_that_cannot_be_used_are_counted_by_reason_and_named(
    target, states, extracted, tmp_path
):
    run = run_of(tmp_path / "run", target)
    cache = caches.write_specforge(tmp_path / "cache", states, group=100)
    folder = cache / "rows_0-100"
    good = (folder / "data_0.ckpt").read_bytes()
    other = dataclasses.replace(states[0], input_ids=states[0].input_ids.flip(0))
    caches.write_specforge(tmp_path / "unmatched", [other])
    shutil.move(tmp_path / "unmatched/rows_0-7/data_0.ckpt", folder / "u.ckpt")
    (folder / "a-copy.ckpt").write_bytes(good)
    for at in (0, 3, 200, len(good) // 2, len(good) - 1):
        (folder / f"cut-{at:05d}.ckpt").write_bytes(good[:at])
    caches.write_specforge(tmp_path / "gz", states[:1], compressed=True)
    packed = (tmp_path / "gz/rows_0-7/data_0.ckpt.gz").read_bytes()
    (folder / "cut.ckpt.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "cut-header.ckpt.gz").write_bytes(packed[:5])
    plain = caches.specforge_content(states[0], (1, 3, 4))
    formats = {
        "text.ckpt": None,
        "list.ckpt": [1, 2],
        "no-ids.ckpt": {**plain, "input_ids": None},
        "no-states.ckpt": {"input_ids": plain["input_ids"]},
        "short.ckpt": {**plain, "aux_hidden_state": plain["aux_hidden_state"][:, :-1]},
        "width.ckpt": {**plain, "aux_hidden_state": plain["aux_hidden_state"][..., :-1]},
        "other-slots.ckpt": {**plain, "aux_hidden_state": plain["aux_hidden_state"][..., :32]},
        "sparse.ckpt": {**plain, "aux_hidden_state": plain["aux_hidden_state"].to_sparse()},
        "ints.ckpt": {**plain, "hidden_state": plain["hidden_state"].long()},
    }
    for name, content in formats.items():
        torch.save(content, folder / name)
    fp8 = {**plain, "hidden_state": plain["hidden_state"].to(torch.float8_e4m3fn)}
    torch.save(fp8, folder / "fp8.ckpt")
    (cache / "notes.txt").write_text("mine")
    os.mkfifo(folder / "pipe.ckpt")
    report = imported(run, cache)
    numbers = report.numbers
    unreadable = dict(numbers["files_unreadable"])
    assert unreadable.pop("fp8 states, too coarse") == 1
    # Three bytes are too few to tell what it was.
    assert unreadable == {"cut off or damaged": 6, "not of the format": len(formats) + 1}
    assert (numbers["files_unmatched"], numbers["files_duplicate"]) == (1, 1)
    assert numbers["files_passed_by"] == 1
    assert numbers["files_used"] == len(states)
    assert files_add_up(numbers)
    assert numbers["units_left"] == 0
    told = " ".join([*report.lines, *report.undone])
    for name in ("cut-00200.ckpt", "cut.ckpt.gz", "list.ckpt", "fp8.ckpt", "u.ckpt", "data_0.ckpt"):
        assert name in told
    (event,) = [
        json.loads(line)
        for line in (run[1].events / "extract.jsonl").read_text().splitlines()
        if '"interrupted"' in line
    ]
    names = event["files"]["unreadable"]
    assert {reason: len(found) for reason, found in names.items()} == numbers["files_unreadable"]
    stage.run(*run)
    assert contents(run[1].features) == extracted[1, 4]


def test_safetensors_that_are_cut_off_or_something_else(target, states, tmp_path):
    run = run_of(tmp_path / "run", target)
    cache = caches.write_speculators(tmp_path / "cache", states)
    good = (cache / "hs_0.safetensors").read_bytes()
    for at in (0, 5, 90, len(good) - 1):
        (cache / f"cut_{at}.safetensors").write_bytes(good[:at])
    tensors = load_file(cache / "hs_0.safetensors")
    wrong_ones = {
        "no_ids": {"hidden_states": tensors["hidden_states"]},
        "flat": {**tensors, "hidden_states": tensors["hidden_states"].flatten(1)},
        "width": {**tensors, "hidden_states": tensors["hidden_states"][..., :8].contiguous()},
        "ints": {**tensors, "hidden_states": tensors["hidden_states"].to(torch.int32)},
    }
    for name, content in wrong_ones.items():
        save_file(content, cache / f"{name}.safetensors")
    states8 = tensors["hidden_states"].to(torch.float8_e4m3fn)
    save_file({**tensors, "hidden_states": states8}, cache / "fp8.safetensors")
    scales = torch.ones(len(states8), 1, 1)
    save_file({**tensors, "hidden_states_scales": scales}, cache / "scaled.safetensors")
    numbers = imported(run, cache, "speculators").numbers
    assert numbers["files_unreadable"] == {
        "cut off or damaged": 4,
        "not of the format": 4,
        "fp8 states, too coarse": 2,
    }
    assert (numbers["files_used"], numbers["units_left"]) == (len(states), 0)
    assert files_add_up(numbers)


def test_a_flipped_bit_in_a_pickle_is_found_by_its_checksum(target, states, extracted, tmp_path):
    run = run_of(tmp_path / "run", target)
    cache = caches.write_specforge(tmp_path / "cache", states, group=100)
    path = cache / "rows_0-100" / "data_5.ckpt"
    data = bytearray(path.read_bytes())
    wanted = caches.specforge_content(states[5], (1, 3, 4))["aux_hidden_state"].numpy().tobytes()
    data[data.index(wanted[:64]) + 40] ^= 4
    path.write_bytes(data)
    report = imported(run, cache, check=0)
    assert report.numbers["files_unreadable"] == {"cannot be used after all": 1}
    assert "data_5.ckpt: cut off or damaged (a checksum does not hold)" in report.undone[0]
    assert report.numbers["units_left"] == 1
    stage.run(*run)
    assert contents(run[1].features) == extracted[1, 4]


@pytest.mark.parametrize("missing", [0, 1])
def test_what_passes_a_check_of_nothing_is_caught_when_extract_goes_on(
    target, states, tmp_path, missing
):
    run = run_of(tmp_path / "run", target)
    cache = caches.write_specforge(tmp_path / "cache", states[missing:], (2, 4, 5))
    report = imported(run, cache, check=0, layers=(1, 3, 4))
    assert report.numbers["units_left"] == missing
    assert report.lines[0].startswith("nothing was compared with the target (--check 0)")
    with pytest.raises(TargetError, match=r"captured again, tap 1 .*states was imported from spec"):
        stage.run(*run)


def test_a_cache_of_other_conversations_is_told(target, states, tmp_path):
    run = run_of(tmp_path / "run", target)
    others = [dataclasses.replace(s, input_ids=s.input_ids.flip(0)) for s in states]
    report = imported(run, caches.write_specforge(tmp_path / "cache", others))
    assert report.numbers["files_unmatched"] == len(states)
    assert "no file has the token ids of a sample of this corpus" in report.undone[0]
    assert nothing_is_recorded(run[1])


def test_into_a_store_with_a_codec_and_out_of_bf16(target, states, tmp_path):
    folder = tmp_path / "store"
    runs = []
    for name in ("imported", "extracted"):
        recipe, run_dir = run_of(tmp_path / name, target)
        extract = dataclasses.replace(
            recipe.extract, store=str(folder / name), codec="planes", recheck_samples=4
        )
        runs.append((dataclasses.replace(recipe, extract=extract), run_dir))
    cache = caches.write_specforge(tmp_path / "cache", states, dtype=torch.bfloat16)
    assert imported(runs[0], cache).numbers["units_left"] == 0
    for run in runs:
        stage.run(*run)
    assert stage.run(*runs[0]).skipped
    first, second = (
        contents(next((folder / name).iterdir())) for name in ("imported", "extracted")
    )
    first.pop("manifest.json"), second.pop("manifest.json")  # they name their store
    assert first == second


def test_into_an_object_store(target, states, extracted, tmp_path, s3):
    recipe, run_dir = run_of(tmp_path / "run", target)
    extract = dataclasses.replace(
        recipe.extract,
        store=s3.url("import"),
        store_options=s3.options,
        codec="none",
        **ROOMY,
    )
    run = dataclasses.replace(recipe, extract=extract), run_dir
    cache = caches.write_specforge(tmp_path / "cache", states)
    with s3.credentials():
        numbers = imported(run, cache).numbers
        assert numbers["units_left"] == 0
        done = stage.run(*run).numbers
        assert (done["units_of_earlier_runs"], done["units_redone"]) == (numbers["units"], 0)
        store = open_setting(*run)[2].store
        for key, data in extracted[1, 4].items():
            if key != "manifest.json":
                assert store.get_range(key, 0, len(data)) == data
    assert {r["kind"] for r in journal(run_dir)} >= {"staged", "verified"}


def test_features_of_another_recipe_are_not_mixed_with(target, states, tmp_path):
    cache = caches.write_specforge(tmp_path / "cache", states)
    imported(run_of(tmp_path / "run", target), cache)
    with pytest.raises(RecipeChanged, match=r"extract\.layer_ids\.0: 1 -> 3"):
        imported(run_of(tmp_path / "run", target, taps=(3, 4)), cache)


@pytest.mark.parametrize(
    ("tool", "stated", "options", "message"),
    [
        ("specforge", {}, {"taps": (1, 2)}, r"the cache has none of 2: .* outputs after 1, 3, 4"),
        ("specforge", {"last": "absent"}, {}, "the run keeps the last hidden state"),
        ("specforge", {"layers": (1, 3)}, {}, "--layers names 2 layers, and the cache has 3"),
        ("specforge", {"layers": (3, 1, 4)}, {}, "must rise"),
        ("specforge", {"layers": (1, 3, 8)}, {}, "the target has 0 to 7"),
        ("speculators", {"layers": (2, 4, 5, 7)}, {}, "the run keeps the last hidden state"),
        ("speculators", {"layers": (2, 4, 5, 6), "last": "normed"}, {}, "names 4 .* has 4 .*among"),
    ],
)
def test_what_does_not_fit_the_cache_is_refused(
    tool, stated, options, message, target, states, tmp_path
):
    write = {"specforge": caches.write_specforge, "speculators": caches.write_speculators}[tool]
    cache = write(tmp_path / "cache", states[:2])
    with pytest.raises(UserError, match=message):
        imported(run_of(tmp_path / "run", target, **options), cache, tool, **stated)


def test_a_cache_that_says_nothing_of_its_layers_has_to_be_told(target, states, tmp_path):
    cache = caches.write_specforge_dflash(tmp_path / "cache", states[:2], (1, 3, 4))
    with pytest.raises(UserError, match=r"3 states a token beside the last.*Give --layers"):
        imported(run_of(tmp_path / "run", target), cache)
    content = {"input_ids": states[0].input_ids, "hidden_state": states[0].normed[None]}
    torch.save({**content, "aux_hidden_state": None}, cache / "data_0.ckpt")
    with pytest.raises(UserError, match="made without `--enable-aux-hidden-states`"):
        imported(run_of(tmp_path / "run", target), cache)


def test_a_source_without_files_or_with_two_kinds_is_refused(target, states, tmp_path):
    run = run_of(tmp_path / "run", target)
    with pytest.raises(UserError, match="no such folder"):
        imported(run, tmp_path / "nowhere")
    cache = caches.write_speculators(tmp_path / "cache", states[:1])
    with pytest.raises(UserError, match=r"no file of specforge \(\*\.ckpt or \*\.ckpt\.gz\)"):
        imported(run, cache)
    (cache / "x.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"\.safetensors and \.pt files"):
        imported(run, cache, "speculators")
    (cache / "hs_0.safetensors").unlink()
    with pytest.raises(DataError, match=r"none of 1 file can be read .* x\.pt: cut off"):
        imported(run, cache, "speculators")
