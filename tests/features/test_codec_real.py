"""The codecs' promises on the hidden states of a real model."""

import pytest

from checkout import ROOT, load_script
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import load_target

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def target():
    folder = ROOT / ".cache" / "smollm2"
    if not folder.is_dir():
        pytest.skip(f"NOT RUN: no target in {folder}; make it with `python demo/fetch.py`")
    return load_target(TargetRecipe(path=str(folder)))


@pytest.fixture(scope="module")
def bench():
    return load_script("benchmarks/codec_sizes.py")


@pytest.fixture(scope="module")
def chat(target, bench):
    return bench.captured(target, samples=32)


@pytest.mark.parametrize(("codec", "most"), [("planes", 0.68), ("int8o", 0.53)])
def test_bytes_against_bfloat16(target, bench, chat, codec, most):
    """Also of rows that no other sample shares: long samples are hardly anything else."""
    whole = bench.coded(chat, target, codec, every=1000)
    apart = bench.coded(bench.without_shared_rows(chat), target, codec, every=1000)
    assert whole.ratio < apart.ratio <= most
    assert apart.ratio > 0.4, "fewer bytes than the values have information: not these values"
    assert (whole.error == 0) == (codec == "planes")


def test_int8o_hardly_moves_the_next_token(target, bench, chat):
    found = bench.coded(chat, target, "int8o", every=5)
    assert 0 < found.kl <= 3e-4
    assert found.top1 >= 0.98
    assert found.error < 0.01
