import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.doctor.plan_bytes import Samples, StoreSizes, store_sizes
from paceline.doctor.plan_machine import Gpu
from paceline.doctor.plan_probe import OBJECT_BYTES, probe_upload
from paceline.doctor.plan_rates import SHARE_OF_PEAK, Flow, Rate, device_rate, flow
from paceline.doctor.plan_space import Staging
from paceline.doctor.plan_target import read_target
from paceline.durable.errors import StoreFailed
from paceline.durable.store import LocalStore, MemoryStore
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe, Recipe, TargetRecipe
from tiny_models import tiny_model

RECIPE = Recipe(extract=ExtractRecipe(taps=(1,), store="s3://bucket/x"))
SAMPLES = Samples(count=1000, tokens=1_000_000, longest=1000, basis="data", said="")


def sizes() -> StoreSizes:
    return store_sizes(RECIPE.extract, SAMPLES, None, num_layers=6, hidden_size=64)


def staged(limit: int, smallest: int = 1_000_000) -> Staging:
    return Staging(
        path="/staging", is_memory=False, smallest=smallest, smooth=5 * smallest, limit=limit
    )


def told(value: float | None) -> Rate:
    return Rate(value=value, source="given" if value else "unknown", said="")


def flows(
    tokens_per_s: float | None, upload: float | None, staging: Staging | None, recipe=RECIPE
) -> Flow:
    return flow(
        told(tokens_per_s), told(upload), recipe=recipe, tokens=SAMPLES.tokens, store=sizes(),
        staging=staging, now=1000.0,
    )  # fmt: skip


def test_the_slowest_of_device_and_upload_is_the_bottleneck():
    store = sizes()
    token = store.total / SAMPLES.tokens
    by_device = flows(1000, 10_000 * token, staged(10**9))
    assert by_device.bottleneck == "device"
    assert by_device.seconds == pytest.approx(1000)
    assert by_device.ends_at == pytest.approx(2000)
    assert by_device.staging_fills_after is None
    assert by_device.staging_lasts == pytest.approx(10**9 / (1000 * token))
    by_upload = flows(1000, 100 * token, staged(10**9))
    assert by_upload.bottleneck == "upload"
    assert by_upload.seconds == pytest.approx(10_000)
    assert by_upload.staging_fills_after == pytest.approx(10**9 / (900 * token))


def test_a_staging_of_one_shard_makes_work_and_upload_take_turns():
    token = sizes().total / SAMPLES.tokens
    alone = flows(1000, 1000 * token, staged(1_000_000))
    assert alone.bottleneck == "staging"
    assert alone.seconds == pytest.approx(2000)
    # A second shard lets one be made while the other is uploaded.
    assert flows(1000, 1000 * token, staged(2_000_000)).seconds == pytest.approx(1000)


def test_nothing_passes_through_a_staging_that_holds_no_shard():
    found = flows(1000, 10**6, staged(999_999))
    assert (found.bottleneck, found.seconds, found.ends_at) == ("staging", None, None)


@given(st.floats(1, 1e6), st.floats(1, 1e9), st.integers(1, 50), st.integers(1, 8))
def test_no_flow_is_faster_than_its_parts(tokens_per_s, upload, shards, workers):
    recipe = dataclasses.replace(RECIPE, target=TargetRecipe(workers=workers))
    found = flows(tokens_per_s, upload, staged(shards * 1_000_000), recipe)
    store = sizes()
    assert found.seconds is not None
    assert found.seconds >= 0.999 * SAMPLES.tokens / tokens_per_s
    assert found.seconds >= 0.999 * store.total / upload
    if shards > workers:
        assert found.bottleneck != "staging"


def test_what_is_not_known_makes_the_end_unknown_and_not_a_guess():
    token = sizes().total / SAMPLES.tokens
    for rate, upload in ((None, 100 * token), (100, None)):
        found = flows(rate, upload, staged(10**9))
        assert (found.bottleneck, found.seconds, found.ends_at) == ("unknown", None, None)
        assert found.at_least == pytest.approx(10_000)
    nothing = flows(None, None, staged(10**9))
    assert (nothing.at_least, nothing.staging_lasts, nothing.made) == (None, None, None)


def test_into_a_folder_only_the_devices_count():
    found = flows(1000, None, None)
    assert (found.bottleneck, found.upload) == ("device", None)
    assert found.seconds == pytest.approx(1000)


def guessed(target: Path, gpus: dict[str, Gpu], deepest: int = 3, **of: Any) -> Rate:
    recipe = Recipe(target=TargetRecipe(**{"dtype": "bfloat16", **of}))
    return device_rate(
        None, recipe, RunDir(target / "run"), read_target(target), deepest=deepest, gpus=gpus
    )


def test_a_guess_is_of_the_layers_that_run_and_says_that_it_is_one(tmp_path):
    target = tiny_model("llama", tmp_path / "target")
    gpus = {f"cuda:{n}": Gpu(name="NVIDIA H100 80GB HBM3", total=80 * 10**9) for n in range(4)}
    rate = guessed(target, gpus, device="cuda:0")
    layers = read_target(target).layer_weights
    assert rate.source == "guess"
    assert rate.value == pytest.approx(SHARE_OF_PEAK * 990e12 / (2 * sum(layers[:4])))
    assert rate.said.startswith("a guess: 40% of the published 990 TFLOP/s of NVIDIA H100")
    four = guessed(target, gpus, devices=(0, 1, 2, 3))
    assert four.value == pytest.approx(4 * rate.value)
    assert "x 4" in four.said


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"device": "cpu"}, "a CPU"),
        ({"device": "cuda:0", "dtype": "float32"}, "float32"),
        ({"device": "cuda:1"}, "no peak is known of Some GPU"),
        ({"devices": (0, 5)}, "cuda:5 is not visible here"),
    ],
)
def test_no_guess_is_made_without_grounds(tmp_path, of, why):
    target = tiny_model("llama", tmp_path / "target")
    gpus = {
        "cuda:0": Gpu(name="NVIDIA A100-SXM4-80GB", total=1),
        "cuda:1": Gpu(name="Some GPU", total=1),
    }
    rate = guessed(target, gpus, **of)
    assert (rate.value, rate.source) == (None, "unknown")
    assert why in rate.said
    assert "--tokens-per-s" in rate.said


def test_no_guess_is_made_of_weights_that_are_not_there(tmp_path):
    from plan_worlds import config_only

    gpus = {"cuda:0": Gpu(name="NVIDIA L4", total=1)}
    rate = guessed(config_only(tmp_path / "t"), gpus, device="cuda:0")
    assert rate.value is None
    assert "model.safetensors" in rate.said


def test_a_probe_leaves_nothing_behind(tmp_path):
    for store in (MemoryStore(), LocalStore(tmp_path / "store")):
        store.put("unit-000000.safetensors", b"ours")
        rate = probe_upload(store, 3)
        assert rate.source == "measured"
        assert rate.value is not None
        assert rate.value > 0
        assert "3 x 8 MiB" in rate.said
        assert [found.key for found in store.list("")] == ["unit-000000.safetensors"]


class _Failing(MemoryStore):
    """Takes some objects, then refuses."""

    def put(self, key, source, crc64=None):
        if key.endswith("-2"):
            raise StoreFailed("no.", transient=False)
        assert len(source) == OBJECT_BYTES
        return super().put(key, source, crc64)


def test_a_probe_that_fails_leaves_nothing_behind_either():
    store = _Failing()
    with pytest.raises(StoreFailed):
        probe_upload(store, 4)
    assert list(store.list("")) == []
