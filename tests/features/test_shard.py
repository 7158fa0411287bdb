import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from feature_samples import assert_same, random_features, sample_of
from paceline.durable.checksum import crc64
from paceline.durable.errors import ShardDamaged
from paceline.durable.fs import RealFileSystem
from paceline.durable.store import LocalStore, Stat
from paceline.features.shard import Shard, write_shard

LENGTHS = [5, 1, 7, 3]
FINGERPRINT = "f" * 32
reuses_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "unit-000000.safetensors"
    write_shard(path, random_features(LENGTHS), fingerprint=FINGERPRINT)
    return path


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 9),
    last=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
@reuses_folder
def test_what_is_written_is_read(tmp_path, lengths, layers, hidden, last, dtype, seed):
    features = random_features(
        lengths, layer_ids=tuple(range(layers)), hidden=hidden, last=last, dtype=dtype, seed=seed
    )
    path = tmp_path / "unit.safetensors"
    stat = write_shard(path, features, fingerprint=FINGERPRINT)
    data = path.read_bytes()
    assert stat == Stat(len(data), crc64(data)) == LocalStore(tmp_path).head(path.name)
    shard = Shard(path)
    assert shard.verify() == stat
    assert shard.fingerprint == FINGERPRINT
    assert shard.lengths == lengths
    assert_same(shard.features, features)
    for n in range(len(lengths)):
        assert_same(shard.read(n), sample_of(features, n))


def test_reading_copies_no_hidden_state_and_outlives_the_shard(path):
    shard = Shard(path)
    one, two = shard.read(2), shard.read(2)
    assert one.last is not None
    assert two.last is not None
    assert one.taps.data_ptr() == two.taps.data_ptr()
    assert one.last.data_ptr() == two.last.data_ptr()
    wanted = sample_of(random_features(LENGTHS), 2)
    del shard, two
    assert_same(one, wanted)


def test_writing_into_what_was_read_never_reaches_the_file(path):
    before = path.read_bytes()
    Shard(path).read(0).taps.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_are_not_there(path, row):
    with pytest.raises(IndexError, match=f"row {row} of 4"):
        Shard(path).read(row)


def test_any_safetensors_reader_opens_it_and_the_metadata_say_all(path):
    features = random_features(LENGTHS)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("taps"), features.taps)
        assert torch.equal(file.get_tensor("last"), features.last)
        assert torch.equal(file.get_tensor("loss_mask").bool(), features.tokens.loss_mask)
        assert file.get_tensor("input_ids").tolist() == features.tokens.input_ids.tolist()
        assert file.get_tensor("offsets").tolist() == [0, 5, 6, 13, 16]
        metadata = file.metadata()
    assert metadata["version"] == "1"
    assert metadata["fingerprint"] == FINGERPRINT
    assert metadata["layer_convention"] == "output_after_layer"
    assert json.loads(metadata["layer_ids"]) == [1, 3]
    assert metadata["last"] == "after_final_norm"
    assert tuple(json.loads(metadata["sample_ids"])) == features.tokens.sample_ids
    assert set(json.loads(metadata["crc64"])) == {
        "taps", "last", "offsets", "input_ids", "loss_mask",
    }  # fmt: skip


def test_hidden_states_begin_aligned(path):
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    assert (8 + header) % 64 == 0


def read_all(path):
    shard = Shard(path)
    shard.verify()
    return shard.features


def test_a_flip_in_any_byte_and_in_any_bit_of_the_opening_is_detected(tmp_path):
    path = tmp_path / "unit.safetensors"
    write_shard(path, random_features([2, 1], hidden=2, layer_ids=(1,)), fingerprint=FINGERPRINT)
    data = bytearray(path.read_bytes())
    opening = range(8 * 64)
    for bit in [*opening, *(8 * byte + byte * 5 % 8 for byte in range(64, len(data)))]:
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(ShardDamaged, match=r"unit\.safetensors"):
            read_all(path)
        data[bit // 8] ^= 1 << bit % 8


@given(data=st.data())
@reuses_folder
def test_any_change_of_bytes_is_detected(path, data):
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=40))
    changed = data.draw(
        st.sampled_from([good[:at], good[:at] + piece, good[:at] + piece + good[at:],
                         good[:at] + piece + good[at + len(piece):]])
    )  # fmt: skip
    if changed == good:
        return
    bad = path.with_name("bad.safetensors")
    bad.write_bytes(changed)
    with pytest.raises(ShardDamaged):
        read_all(bad)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 40, 60, 500])
def test_torn_files_are_damaged_shards(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardDamaged):
        Shard(path)


def test_absent_files_and_other_files_are_damaged_shards(tmp_path):
    with pytest.raises(ShardDamaged, match="is not there"):
        Shard(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\0" * 500)
    with pytest.raises(ShardDamaged):
        Shard(tmp_path / "x")


class Full(RealFileSystem):
    written = 0

    def write(self, file, data):
        self.written += memoryview(data).nbytes
        if self.written > 1500:
            raise OSError(28, "No space left on device")
        super().write(file, data)


def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path):
    path = tmp_path / "unit.safetensors"
    with pytest.raises(OSError, match="No space"):
        write_shard(path, random_features(LENGTHS), fingerprint=FINGERPRINT, fs=Full())
    assert list(tmp_path.iterdir()) == []


def test_equal_features_give_equal_bytes(tmp_path, path):
    other = tmp_path / "other.safetensors"
    write_shard(other, random_features(LENGTHS), fingerprint=FINGERPRINT)
    assert other.read_bytes() == path.read_bytes()


def test_tensors_that_are_no_bytes_at_rest_are_refused(tmp_path):
    whole = random_features([4], dtype=torch.float32)
    strided = type(whole)(whole.tokens, whole.taps[:, :, ::2], None, whole.layer_ids)
    with pytest.raises(ValueError, match="`taps` is not contiguous"):
        write_shard(tmp_path / "x", strided, fingerprint="")
    half = type(whole)(whole.tokens, whole.taps.half(), None, whole.layer_ids)
    with pytest.raises(ValueError, match=r"float16, which is no type at rest"):
        write_shard(tmp_path / "x", half, fingerprint="")
