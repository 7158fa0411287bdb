"""The score on the terminal."""

import pytest

from paceline.score.table import result_lines

POOLED = {"how": "decoded", "tau": 1.5, "tau_prompt_mean": 1.5, "rounds": 8, "by_depth": [0.5]}


def lines(*, prompts: int, interval: tuple[float, float], **changes: object) -> str:
    pooled = {"chain": POOLED | {"tau_interval": interval, "prompts": prompts}}
    one = {"chain": {"prompts": prompts, "tau": 1.5}}
    convention = {
        "name": "paceline", "average": "pooled", "temperatures": [0.0], "set_by_recipe": {},
    } | changes.pop("convention", {})  # fmt: skip
    result = {
        "pooled": pooled,
        "datasets": {"d": pooled},
        "cost": {},
        "settings": [{"temperature": 0.0, "plain": {"cpu_seconds_per_token": 0.1}}],
        "lengths": {"below 512": one},
        "languages": {"en": one},
        "domains": {"d": one},
        "overlap": {},
        "lossless": {
            "checked": 1, "identical": 1, "near_ties": 0, "violations": [],
            "walk_checked": 1, "walk_equal": 1,
        },
        "provenance": {
            "prompts": prompts, "max_new_tokens": 8, "dtype": "float32", "target": "t",
            "processes": prompts, "threads_per_process": 1, "answers": prompts,
            "convention": convention,
        },
    } | changes  # fmt: skip
    return "\n".join(result_lines(result))


def test_an_interval_of_a_single_prompt_is_a_dash():
    text = lines(prompts=1, interval=(1.5, 1.5))
    assert "1.50-1.50" not in text
    assert "–" in text
    assert "1.25-1.75" in lines(prompts=2, interval=(1.25, 1.75))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, ("1 prompt, at most 8 new tokens each", "1 process of 1 thread\n")),
        (2, ("2 prompts, at most", "2 processes of 1 thread\n")),
    ],
)
def test_counts_have_their_nouns_in_the_right_number(count, words):
    text = lines(prompts=count, interval=(1.0, 2.0))
    assert all(part in text for part in words)


def test_divisions_are_shown_where_they_say_more_than_the_pooled_numbers():
    text = lines(prompts=2, interval=(1.0, 2.0))
    assert "τ by context" not in text
    assert "τ by domain" not in text, "the only data set again"
    halves = {
        "en": {"chain": {"prompts": 1, "tau": 1.25}},
        "de": {"chain": {"prompts": 1, "tau": 2.5}},
    }
    text = lines(prompts=2, interval=(1.0, 2.0), languages=halves)
    assert "τ by language" in text
    assert "1.250" in text
    assert "2.500" in text


def test_a_convention_puts_its_average_first_and_says_what_is_not_measured():
    asked = {
        "name": "dflash", "average": "prompt_mean", "temperatures": [0.0, 1.0],
        "set_by_recipe": {"max_new_tokens": 8},
    }  # fmt: skip
    text = lines(prompts=2, interval=(1.0, 2.0), convention=asked)
    header = next(line for line in text.splitlines() if "mean of prompts" in line)
    assert header.index("mean of prompts") < header.index("95 %")
    assert "convention dflash: the mean of prompts is what that harness reports" in text
    assert "the recipe set max_new_tokens 8" in text
    assert "measures at temperature 1 too, which is not measured here" in text
    assert "convention" not in lines(prompts=2, interval=(1.0, 2.0))


def test_the_time_of_a_round_is_split_and_wall_shown_where_measured():
    cost = {
        "verify": 1.0, "draft": 0.5, "overhead": 0.1, "speedup_cpu": 1.2, "speedup_wall": 1.1,
        "projected": {"1": 1.4},
    }  # fmt: skip
    cpu = {"prefill": 0.2, "draft": 0.04, "tree": 0.008, "verify": 0.2, "commit": 0.01}
    timing = {"rounds": 4, "tokens": 8, "wall_seconds": 0.4, "cpu_seconds": cpu}
    timing["phase_seconds"] = {"draft": 0.08}
    text = lines(prompts=2, interval=(1.0, 2.0), cost={"chain": cost}, timings={"chain": timing})
    row = [line for line in text.splitlines() if "10.0 (20.0)" in line]
    assert len(row) == 1
    assert [c.strip() for c in row[0].split("│")[1:-1]] == [
        "chain", "10.0 (20.0)", "2.0", "50.0", "2.5", "100.0", "100.0",
    ]  # fmt: skip


def test_overlap_is_told():
    shared = {"shared_grams": 3, "shared_fraction": 0.125}
    none = {"shared_grams": 0, "shared_fraction": 0.0}
    text = lines(prompts=2, interval=(1.0, 2.0), overlap={"a": shared, "b": none})
    assert "8-grams that are in training prompts too: a 12.5%" in text
    text = lines(prompts=2, interval=(1.0, 2.0), overlap={"b": none})
    assert "no 8-gram of the prompts is in a training prompt" in text
