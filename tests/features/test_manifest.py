import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_stores import published
from paceline.durable.errors import IntegrityError
from paceline.features.manifest import (
    FORMAT_VERSION,
    Manifest,
    QuarantinedUnit,
    decode,
    encode,
    load,
    publish,
)
from paceline.types import LayerConvention

VERSION_1 = Path(__file__).with_name("manifest_v1.json")
"""As the last release of that version published it."""

DIGEST_1 = "8e8cea79abe3c5e04a643f5a019254ab"


@pytest.fixture
def manifest(tmp_path) -> Manifest:
    return published(tmp_path / "made", [[5, 1], [3]])[0]


def test_a_manifest_of_version_1_reads_as_what_it_meant(tmp_path):
    shutil.copy(VERSION_1, tmp_path / "manifest.json")
    found = load(tmp_path)
    assert found.version == FORMAT_VERSION == 2
    assert (found.codec, found.store, found.quarantined) == ("none", "", ())
    assert found.layer_convention is LayerConvention.OUTPUT_AFTER_LAYER
    assert [unit.sample_ids for unit in found.units] == [("a" * 32, "b" * 32), ("ä" * 4,)]


def test_the_order_of_a_training_survives_the_migration():
    """A checkpoint names the digest, and the samples' order hangs on it."""
    found = decode(VERSION_1.read_bytes(), "manifest")
    assert found.digest == json.loads(VERSION_1.read_text())["digest"] == DIGEST_1
    assert decode(encode(found), "manifest").digest == DIGEST_1


def test_all_fields_come_back(tmp_path, manifest):
    full = dataclasses.replace(
        manifest,
        codec="planes",
        store="s3://bucket/prefix",
        quarantined=(QuarantinedUnit(key="unit-000007", reason="died", sample_ids=("a", "b")),),
    )
    publish(tmp_path, full)
    assert load(tmp_path) == full


def test_the_digest_depends_on_content_and_order_and_on_no_place(tmp_path, manifest):
    assert decode(encode(manifest), "m").digest == manifest.digest
    moved = dataclasses.replace(manifest, store="s3://elsewhere")
    assert moved.digest == manifest.digest
    swapped = dataclasses.replace(manifest, units=manifest.units[::-1])
    other = dataclasses.replace(manifest, units=manifest.units[:-1])
    assert len({manifest.digest, swapped.digest, other.digest}) == 3


def test_a_later_version_is_refused_with_advice(tmp_path, manifest):
    publish(tmp_path, dataclasses.replace(manifest, version=3))
    with pytest.raises(IntegrityError, match=r"manifest\.json: format version 3, .* reads 1 to 2"):
        load(tmp_path)
    with pytest.raises(IntegrityError, match="Use the version that wrote it"):
        load(tmp_path)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("version", [1, 2])
def test_a_flipped_bit_in_the_manifest_is_detected(tmp_path, version, data):
    good = VERSION_1.read_bytes()
    good = encode(decode(good, "m")) if version == FORMAT_VERSION else good
    bad = bytearray(good)
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        decode(bytes(bad), "manifest")


def test_what_verify_needs_of_the_features_needs_no_torch():
    code = (
        "import sys, paceline.features.manifest, paceline.features.header, paceline.features.sizes,"
        "paceline.features.format, paceline.features.frames, paceline.features.codec,"
        "paceline.features.cache; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
