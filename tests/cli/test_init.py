import json
import shlex
from pathlib import Path

import pytest

from paceline.cli.init import suggest
from paceline.cli.main import main
from paceline.recipe.check import check_recipe
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import SourceRecipe
from paceline.target.folder import ModelFolder
from tiny_models import tiny_model


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny llama")


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"conversations": [{"from": "human", "value": "hi"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "questions.json").write_text(json.dumps([{"prompt": "why?"}]))
    return tmp_path


def init(target: Path, *arguments: str) -> int:
    return main(["init", "--target", str(target), *arguments])


def test_it_writes_a_recipe_that_checks_and_says_what_comes_next(project, target, capsys):
    assert init(target, "--data", "chats.jsonl", "--heldout", "questions.json") == 0
    assert capsys.readouterr().out.endswith("next: paceline run recipe.yaml\n")
    recipe = load_recipe(project / "recipe.yaml")
    check_recipe(recipe)
    assert recipe.name == "tiny-llama"
    assert recipe.target.path == str(target)
    assert recipe.corpus.sources == (
        SourceRecipe(path=str(project / "chats.jsonl"), name="chats"),
        SourceRecipe(path=str(project / "questions.json"), name="questions", split="heldout"),
    )
    text = (project / "recipe.yaml").read_text()
    assert text.startswith("# A recipe for Paceline. To run it: paceline run recipe.yaml\n")
    assert "  # Share of the steps over which the rate rises.\n  warmup_ratio: 0.04\n" in text


def test_a_real_command_takes_the_recipe_as_it_is(project, target, capsys):
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(40)
    ]
    (project / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert init(target, "--data", "chats.jsonl") == 0
    assert "note: corpus.sources: none has `split: heldout`" in capsys.readouterr().out
    assert main(["prepare", "recipe.yaml"]) == 0
    assert (project / "runs" / "tiny-llama" / "corpus" / "prepared.jsonl").is_file()


def test_an_existing_file_is_replaced_only_by_force(project, target, capsys):
    (project / "recipe.yaml").write_text("mine")
    assert init(target, "--data", "chats.jsonl") == 2
    assert "recipe.yaml exists. Choose another name with --out" in capsys.readouterr().err
    assert (project / "recipe.yaml").read_text() == "mine"
    assert init(target, "--data", "chats.jsonl", "--force") == 0
    assert load_recipe(project / "recipe.yaml").corpus.sources[0].name == "chats"
    assert init(target, "--data", "chats.jsonl", "--out", "sub/other.yaml") == 0
    assert "paceline run sub/other.yaml" in (project / "sub/other.yaml").read_text()


def test_commands_to_copy_hold_for_paths_with_spaces(project, target, capsys):
    assert init(target, "--data", "chats.jsonl", "--out", "my recipes/a b.yaml") == 0
    out = capsys.readouterr().out
    assert "1 layer\n" in out
    wanted = ["paceline", "run", "my recipes/a b.yaml"]
    assert shlex.split(out.rpartition("next: ")[2]) == wanted
    first = (project / "my recipes" / "a b.yaml").read_text().splitlines()[0]
    assert shlex.split(first.rpartition("To run it: ")[2]) == wanted


def test_no_file_is_dropped_where_a_flag_is_given_twice_or_names_collide(project, target):
    (project / "more").mkdir()
    for name in ("more/chats.jsonl", "b.jsonl"):
        (project / name).write_text((project / "chats.jsonl").read_text())
    arguments = ["--data", "chats.jsonl", "more/chats.jsonl", "--data", "b.jsonl"]
    assert init(target, *arguments) == 0
    sources = load_recipe(project / "recipe.yaml").corpus.sources
    assert [s.name for s in sources] == ["chats", "more-chats", "b"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "chats.jsonl: no rows"),
        ('{"words": "x"}\n', "row 1: no_conversation"),
        ("not json\n", "row 1: bad_json"),
        ('{"messages": [{"role": "alien", "content": ""}]}\n', "row 1: unknown_role"),
    ],
)
def test_data_of_an_unknown_form_is_refused_before_anything_is_written(
    project, target, capsys, content, expected
):
    (project / "chats.jsonl").write_text(content)
    assert init(target, "--data", "chats.jsonl") == 2
    assert expected in capsys.readouterr().err
    assert not (project / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data"], "--data: no file given"),
        ([], "--data: no file given"),
        (["--data", "chat.jsonl"], "Did you mean"),
        (["--data", "chats.csv"], "unknown form '.csv'"),
        (["--data", "chats.parquet"], "chats.parquet: not a whole Parquet file"),
        (["--data", "chats.jsonl", "--heldout", "chats.jsonl"], "is also trained on"),
    ],
)
def test_what_cannot_be_a_recipe_is_refused(project, target, capsys, arguments, expected):
    (project / "chats.parquet").write_bytes(b"PAR1")
    (project / "chats.csv").write_bytes(b"a,b")
    assert init(target, *arguments) == 2
    assert expected in capsys.readouterr().err
    assert not (project / "recipe.yaml").exists()


def test_a_target_that_is_none_is_refused(project, target, capsys):
    assert init(project / "none", "--data", "chats.jsonl") == 2
    assert "target.path" in capsys.readouterr().err
    (project / "half").mkdir()
    (project / "half" / "config.json").write_bytes((target / "config.json").read_bytes())
    assert init(project / "half", "--data", "chats.jsonl") == 2
    assert "neither model.safetensors nor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hidden", "layers", "context", "block", "gamma", "taps", "depth"),
    [
        (64, 2, 64, 8, 4.0, 1, 1),
        (576, 30, 2048, 8, 4.0, 3, 5),
        (1024, 16, 131072, 10, 5.0, 3, 4),
        (4096, 32, 131072, 16, 7.0, 3, 5),
        (4096, 5, 8, 8, 4.0, 2, 1),
    ],
)
def test_the_values_suit_the_targets_sizes(
    tmp_path, target, hidden, layers, context, block, gamma, taps, depth
):
    config = json.loads((target / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "max_position_embeddings": context,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    sources = (SourceRecipe(path="/a.jsonl"),)
    for has_cuda in (False, True):
        recipe = suggest(ModelFolder(tmp_path), sources, has_cuda=has_cuda)
        check_recipe(recipe)
        assert recipe.drafter.block_size == block
        assert recipe.train.gamma == gamma
        assert recipe.extract.num_taps == taps
        assert recipe.drafter.layers == depth
        assert recipe.corpus.max_length == min(context, 4096)
        assert recipe.target.device == recipe.train.device == ("cuda:0" if has_cuda else "cpu")
        assert recipe.target.dtype == ("bfloat16" if has_cuda else "float32")
