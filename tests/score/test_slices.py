"""Parts of the rounds: by context, language, domain, prompt."""

import pytest

from paceline.score.results import MethodResult, PromptResult
from paceline.score.slices import by_label, by_length, length_name, prompt_table


def result(
    prompt_id: str,
    rounds: tuple[int, ...],
    *,
    prompt_tokens: int = 3,
    language: str = "en",
    turn: int = 0,
    method: str = "chain",
) -> PromptResult:
    return PromptResult(
        prompt_id=prompt_id,
        dataset="d",
        domain="math",
        language=language,
        turn=turn,
        temperature=0.0,
        prompt_tokens=prompt_tokens,
        answer_ids=(1,) * (1 + sum(rounds)),
        finish="length",
        plain_steps=10,
        plain_cpu_seconds={},
        plain_wall_seconds=0.0,
        methods={method: MethodResult(rounds=rounds, how="walk")},
    )


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (1, "below 512"), (511, "below 512"), (512, "512 to 2k"), (2047, "512 to 2k"),
        (2048, "2k to 8k"), (8192, "8k to 32k"), (32767, "8k to 32k"), (32768, "32k and more"),
    ],
)  # fmt: skip
def test_names_of_lengths(tokens, name):
    assert length_name(tokens) == name


def test_a_round_counts_where_it_begins():
    # The first token of the answer makes the context 509; rounds begin at 509, 511 and 515.
    found = by_length([result("a", (2, 4, 3), prompt_tokens=508)], ["chain"], seed=0)
    assert list(found) == ["below 512", "512 to 2k"]
    short, long = found["below 512"]["chain"], found["512 to 2k"]["chain"]
    assert (short.rounds, short.tokens, short.tau) == (2, 6, 3.0)
    assert (long.rounds, long.tokens, long.prompts) == (1, 3, 1)


def test_no_round_is_lost_or_doubled_by_a_division():
    results = [result(str(n), (1, 2, 3), prompt_tokens=500 * n) for n in range(1, 20)]
    for found in (
        by_length(results, ["chain"], seed=0),
        by_label(results, ["chain"], lambda r: r.prompt_id[0], seed=0),
    ):
        assert sum(of["chain"].rounds for of in found.values()) == 19 * 3
        assert sum(of["chain"].tokens for of in found.values()) == 19 * 6


def test_labels_with_the_most_prompts_come_first_and_methods_stay_apart():
    results = [
        result("a", (2,), language="de"),
        result("b", (4, 4)),
        result("b", (1,), turn=1),
        result("c", (1,)),
        result("c", (3,), method="ddtree-4"),
    ]
    found = by_label(results, ["chain", "ddtree-4"], lambda r: r.language, seed=0)
    assert list(found) == ["en", "de"]
    assert (found["en"]["chain"].prompts, found["en"]["chain"].rounds) == (2, 4)
    assert found["en"]["ddtree-4"].tau == 3.0
    assert "ddtree-4" not in found["de"]


def test_the_table_of_prompts_pools_their_turns():
    results = [result("a", (4, 4)), result("a", (1,), turn=1), result("b", ())]
    table = prompt_table(results, ["chain"])
    assert [row["prompt_id"] for row in table] == ["a", "b"]
    assert table[0]["tau"] == {"chain": 3.0}
    assert table[1]["tau"] == {"chain": None}, "an answer of one token has no round"
