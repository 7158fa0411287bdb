"""Tokens to pieces of text, and rounds to colours."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.report.result import Method, PromptScore
from paceline.report.text import DEEPEST, Origin, choose, origins, pieces
from tiny_models import byte_chatml


@cache
def byte_level() -> Tokenizer:
    """A token for each byte, some for two of them, and special ones."""
    return byte_chatml().backend_tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama's: a leading space is dropped, and bytes stand for what has no token."""
    words = ["<unk>", "▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def decoder(tokenizer: Tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def text_of(made) -> str:
    return "".join(piece.text for piece in made)


@given(st.text(max_size=30))
@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_pieces_joined_are_the_text_and_every_token_is_in_one(tokenizer, text):
    decode = decoder(tokenizer())
    if tokenizer is byte_level:
        ids = list(text.encode())
    else:
        ids = [1, *(4 + byte for byte in text.encode()), 2, 3]
    found = [Origin(kind="own", round=n) for n in range(len(ids))]
    made = pieces(ids, found, decode)
    assert text_of(made) == decode(ids)
    assert [origin for piece in made for origin in piece.origins] == found
    assert all("\ufffd" not in piece.text for piece in made if "\ufffd" not in text)


@given(st.lists(st.integers(0, 258), max_size=30))
def test_bytes_that_are_no_text_lose_nothing(ids):
    decode = decoder(byte_level())
    made = pieces(ids, [Origin(kind="own")] * len(ids), decode)
    assert text_of(made) == decode(ids)
    assert sum(len(piece.origins) for piece in made) == len(ids)


def test_a_character_of_several_tokens_is_one_piece():
    ids = list("a🙂é".encode())
    made = pieces(ids, origins(len(ids), [3, 3, 1], is_ended=False), decoder(byte_level()))
    assert [(piece.text, len(piece.origins)) for piece in made] == [("a", 1), ("🙂", 4), ("é", 2)]
    assert [piece.css for piece in made] == ["first", "d1", "own"]
    assert made[1].title.count("drafted at depth") == 3


def test_tokens_have_the_colour_of_their_rounds():
    found = origins(9, [1, 3, 2, 4], is_ended=False)
    assert [o.css for o in found] == ["first", "own", "d1", "d2", "own", "d1", "own", "d1", "d2"]
    assert [o.round for o in found] == [0, 1, 2, 2, 2, 3, 3, 4, 4]


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(0, 11), st.booleans())
def test_every_token_is_coloured_as_its_round_says(rounds, beyond, is_ended):
    beyond = min(beyond, rounds[-1] - 1) if rounds else 0
    count = 1 + sum(rounds) - beyond
    found = origins(count, rounds, is_ended=is_ended)
    assert len(found) == count
    last = len(found) - (is_ended and bool(rounds))
    place = 1
    for number, size in enumerate(rounds, start=1):
        for depth in range(1, size + 1):
            if place < last:
                kind = "own" if depth == size else f"d{min(depth, DEEPEST)}"
                assert (found[place].css, found[place].round) == (kind, number)
            place += 1
    if is_ended and rounds:
        assert found[-1].kind == "end"


def test_what_the_rounds_do_not_reach_is_not_coloured():
    assert [o.css for o in origins(4, [2], is_ended=False)] == ["first", "d1", "own", "after"]
    assert [o.css for o in origins(1, [], is_ended=True)] == ["first"]


def prompt(number: int, *rounds: int) -> PromptScore:
    return PromptScore(
        prompt_id=str(number),
        dataset="d",
        prompt_tokens=1,
        answer_ids=(1,),
        finish="length",
        methods={"chain": Method(rounds=rounds, how="decoded", identical=True)},
    )


def test_median_best_and_worst_are_chosen_by_tau():
    prompts = [prompt(0, 2, 2), prompt(1, 4), prompt(2), prompt(3, 1, 1), prompt(4, 3)]
    assert [(label, p.prompt_id) for label, p in choose(prompts, "chain")] == [
        ("median", "0"),
        ("best", "1"),
        ("worst", "3"),
    ]
    assert [label for label, _ in choose(prompts[:1], "chain")] == ["median"]
    assert choose([prompt(0)], "chain") == []
    assert choose(prompts, "ddtree-9") == []
