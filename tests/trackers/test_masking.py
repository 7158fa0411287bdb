"""No secret comes through, and nothing else is lost."""

import json
import logging

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.masking import MASK, masked, masked_text, masked_texts, url_holds_secret
from paceline.recipe.schema import DrafterRecipe, ExtractRecipe, Recipe, TrainRecipe
from paceline.watch.events import EventWriter

WORD = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_.~%", min_size=1)
PASSWORD = st.text("abcXYZ0123456789-_.~%!$()*+,:@", min_size=1)
SURROUNDING = st.text("abc ,\n(é", max_size=9)


@given(st.sampled_from(["https", "s3", "postgresql+psycopg"]), WORD, PASSWORD, WORD, SURROUNDING)
def test_nothing_of_a_login_is_left_in_a_url(scheme, user, password, host, around):
    text = f"{around} {scheme}://{user}:{password}@{host}/path {around}"
    assert url_holds_secret(text)
    assert masked_text(text) == f"{around} {scheme}://{MASK}@{host}/path {around}"
    assert not url_holds_secret(f"{scheme}://{host}:8080/{user}@{password.replace(':', '')}")


@given(
    st.sampled_from(
        ["write_token", "X-Amz-Signature", "sig", "api_key", "X-Amz-Credential", "password"]
    ),
    WORD,
)
def test_a_token_in_a_query_is_masked_and_its_neighbours_stay(name, secret):
    text = f"https://host/?sv=2024&{name}={secret}&page=2"
    assert url_holds_secret(text)
    assert masked_text(text) == f"https://host/?sv=2024&{name}={MASK}&page=2"


@given(st.text(max_size=60))
def test_masking_twice_is_masking_once(text):
    assert masked_text(masked_text(text)) == masked_text(text)


@given(st.text("abcdefghij klmno:/.=?&0123456789", max_size=60))
def test_a_text_without_a_secret_stays_as_it_is(text):
    assume("key" not in text and "sig" not in text)
    assert masked_text(text) == text


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@given(st.sampled_from(["api_key", "HF_TOKEN", "client-secret", "Password"]), SCALARS, PLAIN)
def test_what_a_mapping_calls_a_secret_is_masked_at_any_depth(name, secret, other):
    found = masked({"a": [{name: secret, "b": other}]})
    assert found["a"][0][name] == MASK
    assert masked(found) == found


@given(PLAIN)
def test_texts_of_an_event_keep_its_shape(value):
    found = masked_texts({"max_new_tokens": 5, "value": value})
    assert found["max_new_tokens"] == 5
    assert [type(v) for v in found.values()] == [int, type(value)]


def test_a_recipe_keeps_its_own_keys_and_loses_secrets():
    recipe = Recipe(
        drafter=DrafterRecipe(mask_token_id=7),
        extract=ExtractRecipe(
            batch_tokens=512, store_options={"aws_access_key_id": "AKIA", "region": "eu"}
        ),
        train=TrainRecipe(tracker_options={"tracking_uri": "https://me:pw@host/x"}),
    )
    found = masked(recipe)
    assert found["drafter"]["mask_token_id"] == 7
    assert found["extract"]["batch_tokens"] == 512
    assert found["extract"]["store_options"] == {"aws_access_key_id": MASK, "region": "eu"}
    assert found["train"]["tracker_options"] == {"tracking_uri": f"https://{MASK}@host/x"}
    assert found["train"]["betas"] == [0.9, 0.95]


@pytest.fixture
def token(monkeypatch) -> str:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    return "0123456789abcdef"


def test_a_secret_of_the_environment_is_masked_and_a_path_is_not(token):
    assert masked_text(f"401 for {token} of /var/run/token") == f"401 for {MASK} of /var/run/token"


def test_events_hold_no_secret(tmp_path, token):
    heard = []
    events = EventWriter(tmp_path, "train", listener=lambda *told: heard.append(told))
    events.emit("redo", name="x", reason=f"no answer of https://me:pw@host to {token}")
    with pytest.raises(OSError, match="refused"), events:
        raise OSError(f"refused {token}")
    first, last = map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines())
    assert first["reason"] == f"no answer of https://{MASK}@host to {MASK}"
    assert last["error"] == f"OSError: refused {MASK}"
    assert heard == [("redo", first), ("failed", last)]


def test_the_log_and_the_last_words_hold_no_secret(capsys, token):
    assert main([token]) == 2
    logging.getLogger("paceline.trial").warning("sent to https://me:pw@host with %s", token)
    assert f"sent to https://{MASK}@host with {MASK}" in capsys.readouterr().err
