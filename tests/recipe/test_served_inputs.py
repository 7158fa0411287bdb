"""What a recipe says of servers and cannot mean is refused before anything is asked."""

import pytest

from paceline.durable.errors import RecipeChanged, RecipeError
from paceline.recipe.check import check_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.recipe.served_inputs import answering_fields
from paceline.recipe.stage import StageRecord
from paceline.upstream import require_agreement

GOOD = ("http://127.0.0.1:8000/v1", "https://engine.example/v1/", "http://[::1]:8000")


def recipe_of(**options):
    return Recipe(
        target=TargetRecipe(path="target"),
        corpus=CorpusRecipe(sources=(SourceRecipe(path="rows.jsonl"),)),
        regenerate=RegenerateRecipe(**options),
    )


def problems(**options):
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe_of(**options))
    return str(caught.value)


def test_addresses_and_options_of_engines_pass():
    options = {"top_k": 20, "stop_token_ids": [2], "repetition_penalty": 1.1, "min_tokens": 3}
    check_recipe(recipe_of(servers=GOOD, server_options=options))


@pytest.mark.parametrize(
    "url",
    [
        "", "localhost:8000", "ftp://host/v1", "http://", "http:///v1", "http://host:port/v1",
        "http://host/v1?x=1", "http://host/v1#x", "http://ho st/v1", "s3://bucket/key",
        "http://host:0/v1", "http://host..local/v1", f"http://{'a' * 64}.local/v1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_its_key(url):
    said = problems(servers=(GOOD[0], url))
    assert f'regenerate.servers.1: "{url}" is no address of a server' in said


@pytest.mark.parametrize("url", ["http://me:pw1234@host/v1", "http://token-abc@host/v1"])
def test_logins_are_refused_and_not_repeated(url):
    said = problems(servers=(url,))
    assert "regenerate.servers.0: a url with a login in it" in said
    assert url.split("@")[0].split("//")[1] not in said


def test_a_server_is_named_once_whatever_its_last_slash():
    said = problems(servers=(GOOD[0], f"{GOOD[0]}/"))
    assert f"regenerate.servers: {GOOD[0]} stands there 2 times" in said


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("prompt", "set by Paceline itself"), ("messages", "set by Paceline itself"),
        ("temperature", "set by Paceline itself"), ("seed", "set by Paceline itself"),
        ("max_tokens", "set by Paceline itself"), ("top_p", "set by Paceline itself"),
        ("chat_template_kwargs", "set by Paceline itself"), ("n", "did not say by itself"),
        ("stream", "did not say by itself"), ("stop", "did not say by itself"),
        ("api_key", "credentials do not belong"),
    ],
)  # fmt: skip
def test_fields_of_our_own_are_refused_by_name(name, why):
    said = problems(servers=GOOD, server_options={name: 1})
    assert f"regenerate.server_options.{name}: " in said
    assert why in said


def test_options_without_servers_are_refused():
    assert "no server is asked" in problems(server_options={"top_k": 1})


@pytest.mark.parametrize(
    ("made", "asked", "key"),
    [
        ({}, {"servers": GOOD}, "regenerate.api"),
        ({"servers": GOOD}, {}, "regenerate.api"),
        ({"servers": GOOD}, {"servers": GOOD, "api": "chat"}, "regenerate.api"),
        ({"servers": GOOD}, {"servers": GOOD, "model": "m"}, "regenerate.model"),
        (
            {"servers": GOOD},
            {"servers": GOOD, "server_options": {"top_k": 1}},
            "regenerate.server_options.top_k",
        ),
    ],
)
def test_later_stages_know_by_whom_the_answers_are(tmp_path, made, asked, key):
    run_dir = RunDir(tmp_path)
    run_dir.corpus.mkdir()
    run_dir.regenerated.write_text("answers")
    record = StageRecord(
        run_dir.corpus, "regenerate", answering_fields(recipe_of(**made).regenerate)
    )
    record.begin()
    record.finish([run_dir.regenerated], {})
    require_agreement(recipe_of(**made), run_dir)
    patient = {"servers": GOOD[:1], "concurrency": 3, "timeout": 1.0} if "servers" in made else {}
    require_agreement(recipe_of(**made | patient), run_dir)
    with pytest.raises(RecipeChanged, match=key):
        require_agreement(recipe_of(**asked), run_dir)
