import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.durable.errors import RecipeError
from paceline.recipe.convert import known_keys
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import CorpusRecipe, Recipe, SourceRecipe, TrainRecipe


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_absent_keys_take_their_defaults(tmp_path):
    assert load(tmp_path, "name: demo") == Recipe(name="demo")


def test_values_arrive_with_their_types(tmp_path):
    recipe = load(
        tmp_path,
        """
        corpus:
          sources:
            - path: /data/a.jsonl
              limit: 3
            - {path: /data/b.jsonl, split: heldout, name: b}
          template_args: {enable_thinking: false}
        extract: {taps: [1, 4]}
        train: {epochs: 2, betas: [0.9, 0.99]}
        """,
    )
    assert recipe.corpus == CorpusRecipe(
        sources=(
            SourceRecipe(path="/data/a.jsonl", limit=3),
            SourceRecipe(path="/data/b.jsonl", split="heldout", name="b"),
        ),
        template_args={"enable_thinking": False},
    )
    assert recipe.extract.taps == (1, 4)
    assert (recipe.train.epochs, recipe.train.betas) == (2.0, (0.9, 0.99))


def test_t_89_a_misspelt_key_is_named_with_its_line_and_the_right_one(tmp_path):
    message = refusal(tmp_path, "name: demo\ntrain:\n  epochs: 1\n  lerning_rate: 1e-4\n")
    assert message == (
        f"{tmp_path}/recipe.yaml, line 4: train.lerning_rate: unknown key. "
        "Did you mean train.learning_rate?"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trian: {}", "trian: unknown key. Did you mean train?"),
        ("learning_rate: 1", "learning_rate: unknown key. Did you mean train.learning_rate?"),
        (
            "corpus: {sources: [{path: a}, {path: b, nmae: c}]}",
            "corpus.sources.1.nmae: unknown key. Did you mean corpus.sources.1.name?",
        ),
        ("score: {xyzzy: 1}", "score.xyzzy: unknown key. Known here: datasets, "),
        ("3: x", "3: unknown key."),
        ("on: x", "True: unknown key."),
    ],
)
def test_unknown_keys_at_any_depth(tmp_path, text, expected):
    assert expected in refusal(tmp_path, text)


def test_every_misspelt_key_of_the_schema_is_refused_with_the_right_one(tmp_path):
    for key in known_keys():
        if "." not in key or ".0" in key:
            continue
        section, _, name = key.rpartition(".")
        message = refusal(tmp_path, f"{section}: {{{name}q: 1}}")
        assert f"{key}q: unknown key. Did you mean {section}." in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {epochs: fast}", 'train.epochs: expected a number, got the text "fast".'),
        ("train: {epochs: true}", "train.epochs: expected a number, got true."),
        ("train: {epochs: '6'}", 'expected a number, got the text "6". Remove the quotes.'),
        ("train: {anchors: 1.5}", "train.anchors: expected a whole number, got 1.5."),
        ("train: {betas: [1]}", "train.betas: expected a list of 2 numbers, got the list [1]."),
        ("train: [1]", "train: expected a section (`key: value` lines), got the list [1]."),
        ("score: {budgets: 32}", "a list of whole numbers, got 32. Write [32]."),
        ("score: {max_prompts: many}", "expected a whole number, or null, got the text"),
        ("regenerate: {enabled: 1}", "regenerate.enabled: expected true or false, got 1."),
        ("name: 2024", "name: expected text, got 2024. Put it in quotes."),
        ("name: no", "name: expected text, got false. Put it in quotes."),
        ("name: 2024-01-02", "name: expected text, got 2024-01-02 (a date). Put it in quotes."),
        ("name:", "name: expected text, got nothing."),
        (
            "drafter: {init: tarket}",
            'target or random, got the text "tarket". Did you mean target?',
        ),
        ("target: {dtype: fp32}", "expected one of float32, bfloat16, float16, got the text"),
        ("corpus: {sources: a.jsonl}", "corpus.sources: expected a list of sections (`- ` items)"),
        ("corpus: {sources: [a.jsonl]}", "corpus.sources.0: expected a section"),
        ("corpus: {sources: [{name: a}]}", "line 1: corpus.sources.0.path: missing; expected text"),
        ("corpus: {template_args: {1: 2}}", "Its names must be text: put them in quotes."),
        ("corpus: {seed: " + "9" * 5000 + "}", "not valid YAML"),
        ("train: {epochs: " + "9" * 400 + "}", "expected a number, got a huge number."),
    ],
)
def test_wrong_types_are_told_in_words(tmp_path, text, expected):
    message = refusal(tmp_path, text)
    assert expected in message
    assert "$" not in message


def test_all_problems_are_listed_at_once(tmp_path):
    message = refusal(tmp_path, "nam: x\ntrain:\n  epochs: x\nscore:\n  budgets: 1\n")
    assert [line.split(": ")[1] for line in message.splitlines()] == [
        "nam",
        "train.epochs",
        "score.budgets",
    ]


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-4", "1.0e-4", ".0001", "0.0001", "1.e-4"])
def test_numbers_with_an_exponent_are_numbers(tmp_path, text):
    assert load(tmp_path, f"train: {{learning_rate: {text}}}").train.learning_rate == 1e-4
    assert load(tmp_path, "{}", f"train.learning_rate={text}").train.learning_rate == 1e-4


def test_text_that_looks_a_bit_like_a_number_stays_text(tmp_path):
    for name in ("1e", "e5", "1e-4x", "v1e-4", "'1e-4'"):
        assert load(tmp_path, f"name: {name}").name == name.strip("'")


def test_duplicate_keys_are_refused(tmp_path):
    message = refusal(tmp_path, "train:\n  seed: 1\n  epochs: 2\n  seed: 3\n")
    assert "line 4: train.seed stands twice, first in line 2." in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n", "not a recipe"),
        ("hello", "not a recipe"),
        ("a: b: c", "line 1, column 5: not valid YAML"),
        ("train:\n\tepochs: 1", "line 2, column 1: not valid YAML"),
        ("name: [a", "not valid YAML"),
        ("--- {name: a}\n--- {name: b}\n", "not valid YAML"),
        ("name: !!python/name:os.system x", "not valid YAML"),
        ("name: 2024-13-45", "not valid YAML"),
        ("? [a]\n: b", "not valid YAML"),
        ("corpus: &c {template_args: {x: *c}}", "an alias that contains itself"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, text, expected):
    message = refusal(tmp_path, text)
    assert expected in message
    assert "recipe.yaml" in message


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(path)


def test_a_missing_recipe_and_a_folder_say_what_to_do(tmp_path):
    with pytest.raises(RecipeError, match=r"no such recipe\. `paceline init"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match=f"--run {tmp_path}"):
        load_recipe(tmp_path)


def test_a_section_whose_keys_are_all_commented_out_takes_its_defaults(tmp_path):
    assert load(tmp_path, "train:\n  # epochs: 3\nname: a\n").train == TrainRecipe()


def test_relative_paths_are_relative_to_the_current_directory(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load(
        tmp_path, "target: {path: model}\ncorpus: {sources: [{path: ~/a.jsonl}, {path: /b.jsonl}]}"
    )
    assert recipe.target.path == str(elsewhere / "model")
    assert [s.path for s in recipe.corpus.sources] == [str(tmp_path / "a.jsonl"), "/b.jsonl"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", ""), ("here", "{cwd}/here"), ("/there", "/there"), ("~/home", "{cwd}/home"),
        ("s3://bucket/prefix", "s3://bucket/prefix"), ("file:///data", "file:///data"),
    ],
)  # fmt: skip
def test_places_of_shards_are_the_same_from_any_folder(tmp_path, monkeypatch, given, meant):
    """A service goes on with a run from another folder than the one it was begun in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    extract = load(tmp_path, f"extract: {{store: '{given}', staging: stage}}").extract
    assert extract.store == meant.format(cwd=tmp_path)
    assert extract.staging == str(tmp_path / "stage")
    assert load(tmp_path, "extract: {staging: auto}").extract.staging == "auto"


def test_overrides_reach_every_kind_of_place(tmp_path):
    recipe = load(
        tmp_path,
        "corpus: {sources: [{path: /a.jsonl}, {path: /b.jsonl}]}\ntrain: {epochs: 2}",
        "corpus.sources.1.limit=5",
        "regenerate.enabled=false",
        "train.betas.1=0.5",
        "corpus.template_args.enable_thinking=no",
        "corpus.template_args.style={tone: dry}",
        "extract.taps=[1, 2]",
        "extract.taps.1=7",
        "name=a=b",
        "train.epochs=1",
        "train.epochs=4",
    )
    assert [s.limit for s in recipe.corpus.sources] == [None, 5]
    assert not recipe.regenerate.enabled
    assert recipe.train.betas == (0.9, 0.5)
    assert recipe.corpus.template_args == {"enable_thinking": False, "style": {"tone": "dry"}}
    assert recipe.extract.taps == (1, 7)
    assert recipe.name == "a=b"
    assert recipe.train.epochs == 4.0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lerning_rate=1", "train.lerning_rate: unknown key. Did you mean train.learning_"),
        ("trian.epochs=1", "trian: unknown key. Did you mean train?"),
        ("epochs=1", "epochs: unknown key. Did you mean train.epochs?"),
        ("train.epochs", "expected KEY=VALUE, such as train.epochs=3."),
        ("=1", "expected KEY=VALUE"),
        ("train..epochs=1", "expected KEY=VALUE"),
        ("train.epochs=fast", 'train.epochs: expected a number, got the text "fast".'),
        ("train.epochs=", "train.epochs: expected a number, got nothing."),
        ("train.epochs=[", "not valid YAML"),
        ("train.epochs.x=1", "train.epochs has no keys or places under it"),
        ("extract.taps.0=1", "extract.taps has no keys or places under it"),
        ("corpus.sources.1.limit=5", "1 is no place in the list corpus.sources (0 to 0)."),
        ("corpus.sources.-1.limit=5", "-1 is no place in the list corpus.sources"),
        ("corpus.sources.0.limt=5", "Did you mean corpus.sources.0.limit?"),
    ],
)
def test_bad_overrides_are_refused_by_name(tmp_path, override, expected):
    message = refusal(tmp_path, "corpus: {sources: [{path: /a.jsonl}]}", override)
    assert message.startswith(f"--set {override}")
    assert expected in message


@given(st.text(string.ascii_lowercase + "_", min_size=1), st.integers() | st.text() | st.booleans())
def test_no_unknown_key_is_ever_taken(tmp_path_factory, key, value):
    known = {k.partition(".")[0] for k in known_keys()}
    if key in known:
        return
    path = tmp_path_factory.getbasetemp() / "unknown.yaml"
    path.write_text(yaml.safe_dump({key: value}))
    with pytest.raises(RecipeError, match="unknown key"):
        load_recipe(path)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_load_or_are_refused_by_name(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "arbitrary.yaml"
    path.write_bytes(data)
    try:
        outcome = load_recipe(path)
    except RecipeError as error:
        outcome = str(error)
    assert isinstance(outcome, Recipe) or "arbitrary.yaml" in outcome
