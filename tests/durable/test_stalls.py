import pytest

from paceline.durable.amounts import shards_text, size_text, span_text
from paceline.durable.stalls import Stalls, budget_advice, space_advice


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_waits_are_counted_by_kind_the_lasting_one_included():
    clock = Clock()
    stalls = Stalls(clock=clock)
    first = stalls.wait("budget", "full", is_idle=True)
    clock.now += 3
    assert stalls.wait("budget", "still full").since == first.since
    clock.now += 4
    stalls.wait("space", "disk")
    clock.now += 5
    assert stalls.seconds == {"budget": 7.0, "space": 5.0}
    assert stalls.idle_seconds == 3.0
    assert stalls.lasted() == 12.0, "one wait, whatever kinds it had"
    stalls.over()
    clock.now += 6
    assert stalls.seconds == {"budget": 7.0, "space": 5.0}
    assert (stalls.lasted(), stalls.waiting) == (0.0, None)


def test_progress_in_a_wait_begins_it_anew():
    clock = Clock()
    stalls = Stalls(clock=clock)
    stalls.wait("space", "disk")
    clock.now += 10
    stalls.progress()
    clock.now += 2
    stalls.wait("space", "disk")
    assert stalls.lasted() == 2.0
    assert stalls.seconds == {"space": 12.0}


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("budget", "look at the network and at the store"),
        ("space", "Make room there"),
        ("journal", "Make room on that disk"),
    ],
)
def test_who_gives_up_says_what_to_do(kind, remedy):
    clock = Clock()
    stalls = Stalls(clock=clock)
    assert stalls.given_up() == ""
    stalls.wait(kind, "/data/x: as it is")
    clock.now += 70
    full = "" if kind == "budget" else "No space left on device for 70 s: "
    assert stalls.given_up().startswith(f"{full}/data/x: as it is. ")
    assert remedy in stalls.given_up()
    assert stalls.given_up().endswith("the same command goes on from there.")
    stalls.wait(kind, "/data/x: as it is. Make another.")
    assert stalls.given_up() == f"{full}/data/x: as it is. Make another."
    stalls.wait("store", "s3://b: the store says 503. Look there; 3 shards in staging")
    said = "s3://b: the store says 503. Look there; 3 shards in staging. Given up after "
    assert stalls.given_up().startswith(said)
    assert stalls.given_up().endswith("the same command goes on from there.")


def test_advice_names_the_bottleneck():
    upload = budget_advice(41 * 60, 3 * 3600, 0, 4)
    assert upload.startswith("staging was full for 41 min of 3.0 h: the upload is the bottleneck")
    assert "a larger `extract.staging_bytes` would not help" in upload
    small = budget_advice(41 * 60, 3 * 3600, 40 * 60, 4)
    assert "fewer than 4 uploads under way: a larger `extract.staging_bytes`" in small
    assert space_advice("/data", 600, 3600, None).endswith("make room there")
    assert "`extract.high_mark: 0.85`" in space_advice("/data", 600, 3600, 0.85)


@pytest.mark.parametrize(
    ("size", "text"), [(812, "812 B"), (1000, "1.0 kB"), (3.93e12, "3.9 TB"), (2.5e9, "2.5 GB")]
)
def test_sizes(size, text):
    assert size_text(size) == text


def test_spans_and_shards():
    assert [span_text(s) for s in (4, 119, 120, 7199, 7200)] == [
        "4 s", "119 s", "2 min", "120 min", "2.0 h",
    ]  # fmt: skip
    assert [shards_text(n) for n in (0, 1, 1234)] == ["0 shards", "1 shard", "1,234 shards"]
