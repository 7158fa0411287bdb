"""The score on the terminal."""

import pytest

from paceline.score.table import result_lines

POOLED = {"how": "decoded", "tau": 1.5, "tau_prompt_mean": 1.5, "rounds": 8, "by_depth": [0.5]}


def lines(*, prompts: int, interval: tuple[float, float]) -> str:
    pooled = {"chain": POOLED | {"tau_interval": interval, "prompts": prompts}}
    result = {
        "pooled": pooled,
        "datasets": {"d": pooled},
        "cost": {},
        "plain": {"cpu_seconds_per_token": 0.1},
        "lossless": {
            "checked": 1, "identical": 1, "near_ties": 0, "violations": [],
            "walk_checked": 1, "walk_equal": 1,
        },
        "provenance": {
            "prompts": prompts, "max_new_tokens": 8, "dtype": "float32", "target": "t",
            "processes": prompts, "threads_per_process": 1,
        },
    }  # fmt: skip
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
