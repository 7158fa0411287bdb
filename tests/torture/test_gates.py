"""Reduced gates of `make torture`, and its command.

The other gates' reduced forms stand beside what they torture: in tests/durable test_crash,
test_uploader, test_budget and test_object_store, in tests/features test_bitflips.
"""

import pytest

from checkout import load_script
from torture_gates import GATES, Gate, Result, World, kills_local, kills_online, kills_s3
from torture_kills import random_kills_of_extractions

SEED = 20


@pytest.fixture(scope="module")
def command():
    return load_script("torture/run.py").main


def test_killed_extractions_lose_nothing_and_do_nothing_twice(tmp_path):
    found = kills_local(World(tmp_path, SEED, "small"))
    print(found.counts)
    assert found.problems == []


def test_nor_do_those_that_upload_to_a_server(tmp_path, s3):
    found = kills_s3(World(tmp_path, SEED, "small", s3))
    print(found.counts)
    assert found.problems == []


def test_workers_of_an_online_training_that_are_killed_lose_and_double_no_sample(tmp_path):
    found = kills_online(World(tmp_path, SEED, "small"))
    print(found.counts)
    assert found.problems == []


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [("hasty", "recorded as verified, the store has"), ("forgetful", "made again")],
)
def test_sabotaged_extractions_are_found_by_kills(tmp_path, sabotage, words):
    found = random_kills_of_extractions(tmp_path, kills=300, seed=SEED, sabotage=sabotage)
    for kind in ("local", "faulty"):
        assert any(line.startswith(kind) and words in line for line in found.findings), found


def test_every_promise_has_its_gate():
    assert [gate.name for gate in GATES] == [
        "kills-local",
        "kills-s3",
        "kills-online",
        "commit-faults",
        "bit-flips",
        "uploads",
        "back-pressure",
        "server-killed",
        "sabotage",
    ]


def _broken(world: World) -> Result:
    raise RuntimeError(f"no dice of {world.seed}")


FAKES = (
    Gate("good", lambda world: Result(f"1,000 things in {world.scale}", [])),
    Gate("bad", lambda _: Result("3 things", [f"thing {n} is lost" for n in range(30)])),
    Gate("broken", _broken),
)


def test_a_line_for_each_gate_and_the_numbers_last(command, capsys):
    assert command(["--seed", "7"], FAKES) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "good: passed, seed 7, 0 s: 1,000 things in full"
    assert lines[1] == "bad: FAILED, seed 7, 0 s: 3 things"
    assert lines[2] == "    thing 0 is lost"
    assert lines[22] == "    and 10 more"
    assert lines[23] == "    again: python torture/run.py --only bad --seed 7 --scale full"
    assert lines[24] == "broken: FAILED, seed 7, 0 s: did not come to its end"
    assert lines[25] == "    RuntimeError: no dice of 7"
    assert lines[-1] == "1 gates passed, 2 failed"


def test_one_gate_alone_with_dice_of_its_own(command, capsys):
    seeds = set()
    for _ in range(2):
        assert command(["--only", "good", "--scale", "small"], FAKES) == 0
        first, last = capsys.readouterr().out.splitlines()
        assert first.endswith("1,000 things in small")
        assert last == "1 gates passed, 0 failed"
        seeds.add(first.split(",")[1])
    assert len(seeds) == 2
    with pytest.raises(SystemExit):
        command(["--only", "god"], FAKES)


def test_a_real_gate_repeats_itself_by_its_seed(command, capsys):
    outputs = []
    for _ in range(2):
        assert command(["--only", "bit-flips", "--scale", "small", "--seed", "3"]) == 0
        outputs.append(capsys.readouterr().out)
    assert "seed 3" in outputs[0]
    assert outputs[0].partition(" s: ")[2] == outputs[1].partition(" s: ")[2]
