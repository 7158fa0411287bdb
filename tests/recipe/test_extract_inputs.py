"""Places, marks and devices of the extraction, judged before anything is loaded."""

from dataclasses import replace

import pytest

from paceline.durable.errors import RecipeError
from paceline.recipe.check import check_recipe
from paceline.recipe.extract_inputs import is_object_store, resolved_codec
from paceline.recipe.schema import CorpusRecipe, ExtractRecipe, Recipe, SourceRecipe, TargetRecipe

GOOD = Recipe(
    target=TargetRecipe(path="target"), corpus=CorpusRecipe(sources=(SourceRecipe(path="a.jsonl"),))
)


def problems(**extract):
    try:
        check_recipe(replace(GOOD, extract=replace(GOOD.extract, **extract)))
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("low", "high"), [(0.8, 0.8), (0.9, 0.8), (0.71, 0.7)])
def test_t_89_a_low_mark_that_is_not_below_the_high_one_is_refused(low, high):
    assert "extract.low_mark" in problems(low_mark=low, high_mark=high)


def test_marks_that_lie_apart_are_fine():
    assert problems(low_mark=0.5, high_mark=1.0) == ""


@pytest.mark.parametrize(
    "url", ["http://x/y", "ftp://x", "memory://a", "s3:///", "s3://", "file:///"]
)
def test_stores_that_cannot_be_are_refused(url):
    assert "extract.store" in problems(store=url)


@pytest.mark.parametrize(
    "url", ["", "shards", "/data/shards", "file:///data", "s3://b", "gs://b/p"]
)
def test_stores_that_can_be(url):
    assert problems(store=url) == ""


@pytest.mark.parametrize(
    "name",
    [
        "secret_access_key",
        "access_key_id",
        "aws_session_token",
        "password",
        "key",
        "Token",
        "sse_customer_key_base64",
    ],
)
def test_credentials_are_kept_out_of_recipes(name):
    assert "environment" in problems(store="s3://b", store_options={name: "x"})


@pytest.mark.parametrize(
    "name",
    [
        "endpoint",
        "region",
        "allow_http",
        "virtual_hosted_style_request",
        "aws_sse_kms_key_id",
        "sse_bucket_key_enabled",
    ],
)
def test_other_options_pass(name):
    assert problems(store="s3://b", store_options={name: "x"}) == ""


def test_options_without_an_object_store_are_refused():
    assert "store_options" in problems(store="/data", store_options={"endpoint": "x"})


def test_the_codec_is_lossless_and_small_only_where_bytes_travel():
    assert resolved_codec(ExtractRecipe()) == "none"
    assert resolved_codec(ExtractRecipe(store="/data")) == "none"
    assert resolved_codec(ExtractRecipe(store="S3://b/p")) == "planes"
    assert resolved_codec(ExtractRecipe(store="s3://b", codec="none")) == "none"
    assert is_object_store("az://b")
    assert not is_object_store("file:///a")


def test_devices_are_named_once_and_need_processes():
    doubled = replace(GOOD, target=replace(GOOD.target, devices=(0, 0)))
    with pytest.raises(RecipeError, match=r"target\.devices"):
        check_recipe(doubled)
    inline = replace(
        GOOD, target=replace(GOOD.target, devices=(0,)), extract=ExtractRecipe(isolate=False)
    )
    with pytest.raises(RecipeError, match="isolate"):
        check_recipe(inline)
    many = replace(
        GOOD, target=replace(GOOD.target, workers=2), extract=ExtractRecipe(isolate=False)
    )
    with pytest.raises(RecipeError, match="isolate"):
        check_recipe(many)
