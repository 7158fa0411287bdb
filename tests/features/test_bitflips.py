from paceline.features.shard import Shard
from torture_bitflips import bit_flips


def test_no_flipped_bit_passes_as_valid(tmp_path):
    found = bit_flips(tmp_path, count=660, seed=11)
    assert found.accepted == []
    assert found.done.total() == 660
    assert len(found.done) == 11


def test_verification_that_checks_nothing_is_seen(tmp_path):
    """The gate must fail on a build that trusts the header alone."""

    def trusting(shard: Shard):
        return shard.header.promised

    found = bit_flips(tmp_path, count=110, seed=11, verify=trusting)
    assert len(found.accepted) > 10
    assert all("verified as it was written" in line for line in found.accepted)
