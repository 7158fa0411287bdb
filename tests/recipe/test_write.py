import dataclasses
import subprocess
import typing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.durable.errors import IntegrityError
from paceline.recipe import schema
from paceline.recipe.convert import known_keys
from paceline.recipe.load import load_recipe, resolve_paths
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    ScoreRecipe,
    ScoreSetRecipe,
    SourceRecipe,
    TargetRecipe,
    TrainRecipe,
)
from paceline.recipe.write import (
    RUN_MARK,
    adopt_recipe,
    check_run_recipe,
    field_docs,
    recipe_yaml,
    template,
    write_recipe,
)

SECTIONS = [
    kind
    for kind in vars(schema).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
]

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
template_args = st.dictionaries(
    st.text(),
    st.recursive(
        scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
    ),
    max_size=3,
)
st.register_type_strategy(float, st.floats(allow_nan=False))
paths = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(
    "/d/{}".format
)
sources = st.builds(
    SourceRecipe, path=paths, name=..., split=..., limit=..., weight=..., max_samples=...
)
corpora = st.builds(
    CorpusRecipe,
    sources=st.lists(sources, max_size=3).map(tuple),
    max_length=...,
    on_length=...,
    min_loss_tokens=...,
    validation_fraction=...,
    leading_assistant=...,
    consecutive_roles=...,
    roles=...,
    last_turn_only=...,
    template_args=template_args,
    template_file=st.none() | paths,
    on_loop=...,
    on_same_prompt=...,
    max_overlap=...,
    strict=...,
    seed=...,
    workers=...,
)
regenerations = st.builds(
    RegenerateRecipe,
    max_new_tokens=...,
    temperature=...,
    servers=...,
    model=...,
    api=...,
    server_options=template_args,
    timeout=...,
)
drafters = st.builds(
    dataclasses.replace,
    st.from_type(DrafterRecipe),
    warm_start=st.none() | paths,
    vocab_text=st.lists(paths, max_size=3).map(tuple),
)
# Not any text: `~name` is refused where there is no such user.
targets = st.builds(dataclasses.replace, st.from_type(TargetRecipe), path=paths)
extracts = st.builds(
    dataclasses.replace,
    st.from_type(ExtractRecipe),
    store=st.sampled_from(["", "s3://bucket/prefix"]) | paths,
    staging=st.just("auto") | paths,
)
score_sets = st.builds(ScoreSetRecipe, path=paths, adapter=..., name=..., limit=...)
scores = st.builds(
    ScoreRecipe,
    datasets=st.lists(score_sets, max_size=2).map(tuple),
    convention=...,
    max_prompts=...,
    max_new_tokens=...,
    warmup=...,
    budgets=...,
    walk_budgets=...,
    walk_check_prompts=...,
    seed=...,
)
recipes = st.builds(
    Recipe,
    name=...,
    target=targets,
    corpus=corpora,
    regenerate=regenerations,
    extract=extracts,
    drafter=drafters,
    train=...,
    score=scores,
)


@settings(deadline=None, max_examples=20)
@example(Recipe(corpus=CorpusRecipe(template_args={"1e5": "0E0"})))
@given(recipes)
def test_a_written_recipe_reads_back_equal(tmp_path_factory, recipe):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    write_recipe(recipe, path)
    assert load_recipe(path) == resolve_paths(recipe)
    assert recipe_yaml(load_recipe(path)) == path.read_text(encoding="utf-8")


@settings(deadline=None, max_examples=20)
@given(recipes)
def test_a_template_reads_back_equal(tmp_path_factory, recipe):
    path = tmp_path_factory.getbasetemp() / "template.yaml"
    path.write_bytes(template(recipe).encode())
    assert load_recipe(path) == resolve_paths(recipe)


def test_a_written_recipe_has_absolute_paths_and_every_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(
        corpus=CorpusRecipe(sources=(SourceRecipe(path="data/a.jsonl"),)),
        train=TrainRecipe(objective=(ObjectiveTerm(kind="kl"),)),
        score=ScoreRecipe(datasets=(ScoreSetRecipe(path="data/b.jsonl"),)),
    )
    write_recipe(recipe, Path("recipe.yaml"))
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"path: {tmp_path}/data/a.jsonl" in text
    assert f"path: {tmp_path}/data/b.jsonl" in text
    names = {key.rpartition(".")[2] for key in known_keys()}
    assert {line.strip("- ").partition(":")[0] for line in text.splitlines()} >= names


def test_a_failed_write_leaves_the_old_recipe(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    write_recipe(Recipe(name="old"), path)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_recipe(Recipe(name="new"), path)
    assert load_recipe(path).name == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_what_a_killed_process_left_half_written_beside_the_recipe_is_removed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    run = RunDir(tmp_path)
    left = tmp_path / f"recipe.yaml.{ended.pid}.partial"
    for _ in range(2):
        left.write_bytes(b"name: o")
        adopt_recipe(Recipe(name="one"), run)
        assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_field_of_the_schema_has_a_doc(kind):
    docs = field_docs(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(typing.get_type_hints(kind)[field.name]):
            continue
        assert docs.get(field.name, "").endswith("."), f"{kind.__name__}.{field.name}"
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")


def test_the_template_has_each_doc_above_its_key():
    recipe = Recipe(corpus=CorpusRecipe(sources=(SourceRecipe(path="a"), SourceRecipe(path="b"))))
    text = template(recipe)
    lines = text.splitlines()
    place = lines.index("  warmup_ratio: 0.04")
    assert lines[place - 1] == "  # Share of the steps over which the rate rises."
    assert lines[lines.index("train:") - 1] == "# The training of the drafter."
    assert text.count("# Read at most this many rows.") == 1
    assert max(map(len, lines)) <= 100
    assert "\n\n\n" not in text


def test_the_recipe_of_a_run_proves_itself(tmp_path):
    path = tmp_path / "recipe.yaml"
    write_recipe(Recipe(name="one"), path)
    check_run_recipe(path)
    whole = path.read_bytes()
    for place in range(len(RUN_MARK), len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if path.read_bytes().startswith((RUN_MARK + "# CRC64NVME of all below: ").encode()):
            with pytest.raises(IntegrityError, match="damaged, or edited by hand"):
                check_run_recipe(path)
    path.write_bytes(RUN_MARK.encode() + whole.split(b"\n", 2)[2])
    check_run_recipe(path)  # of an older Paceline, without a checksum
