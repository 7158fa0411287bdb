import json
import re

import pytest

from fixtures_chatml import save_tokenizer
from lint_data import chats, faulty, source
from paceline.cli.main import main
from report_pages import Page


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "target")
    source(tmp_path, "good", chats(60))
    source(tmp_path, "bad", faulty())
    source(tmp_path, "prompts", [{"prompt": f"Say {i}"} for i in range(30)])
    return tmp_path


def test_usable_data(folder, capsys):
    assert main(["lint", "good.jsonl", "--target", "target"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("== findings\n")
    assert "wrote lint.html" in out
    assert re.search(r"^good +training +60 +60 +0 +0 +60 ", out, re.MULTILINE)
    assert "usable" in Page((folder / "lint.html").read_text()).words
    assert {p.name for p in folder.glob("*") if p.is_file()} == {
        "lint.html", "good.jsonl", "bad.jsonl", "prompts.jsonl",
    }  # fmt: skip


def test_unusable_data(folder, capsys):
    told = ["lint", "good.jsonl", "bad.jsonl", "--target", "target", "--heldout", "prompts.jsonl"]
    assert main([*told, "--out", "x.html"]) == 1
    out = capsys.readouterr().out
    assert out.index("serious: ") < out.index("== sources") < out.index("== rows left out")
    for part in ("lengths", "languages", "vocabulary"):
        assert f"== {part}\n" in out
    assert "not usable as it is" in Page((folder / "x.html").read_text()).words


def test_prompts(folder, capsys):
    assert main(["lint", "prompts.jsonl", "--target", "target"]) == 0
    assert "No row has an answer, so the prompts were looked at" in capsys.readouterr().out
    answers = ["--set", "regenerate.enabled=false"]
    assert main(["lint", "prompts.jsonl", "--target", "target", *answers]) == 1
    assert main(["lint", "good.jsonl", "--target", "target", "--prompts"]) == 0
    assert "Only prompts were looked at" in capsys.readouterr().out


def test_settings_and_limits(folder, capsys):
    told = ["lint", "good.jsonl", "--target", "target", "--limit", "9"]
    assert main([*told, "--set", "corpus.max_length=50", "--set", "corpus.seed=3"]) == 0
    out = capsys.readouterr().out
    assert "100 % of the samples are cut at 50 tokens" in out
    assert re.search(r"^good +training +9 +9 ", out, re.MULTILINE)


def test_a_recipe_tells_all_and_flags_go_before_it(folder, capsys):
    recipe = {
        "target": {"path": "target"},
        "corpus": {
            "sources": [{"path": "good.jsonl"}, {"path": "prompts.jsonl", "split": "heldout"}],
            "last_turn_only": True,
        },
        "regenerate": {"enabled": False, "max_new_tokens": 8},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["lint", "--recipe", "recipe.yaml"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^good +training +60 +60 ", out, re.MULTILINE)
    assert re.search(r"^prompts +evaluation +30 +30 ", out, re.MULTILINE)
    assert main(["lint", "bad.jsonl", "--recipe", "recipe.yaml"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^bad +training ", out, re.MULTILINE)
    assert re.search(r"^prompts +evaluation ", out, re.MULTILINE)
    assert not re.search(r"^good +", out, re.MULTILINE)
    # What prepare would refuse is not looked at as something else.
    recipe["corpus"]["sources"] = [{"path": "prompts.jsonl"}]
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["lint", "--recipe", "recipe.yaml"]) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "no data. Name at least one file"),
        (["good.jsonl"], "no target. Give the model's folder"),
        (["good.jsonl", "--target", "none"], "no such folder"),
        (["none.jsonl", "--target", "target"], "no such file"),
        (["good.jsonl", "--target", "target", "--limit", "0"], "--limit: 0 is impossible"),
        (["good.jsonl", "--target", "target", "--set", "corpus.max_lenth=3"], "unknown key"),
        (["good.jsonl", "--target", "target", "--set", "corpus.max_length=0"], "is impossible"),
        (["good.jsonl", "--target", "target", "--out", "target"], "a folder. Name a file"),
        (["good.jsonl", "--target", "target", "--out", "bad.jsonl"], "would be replaced"),
        (["--recipe", "none.yaml"], "no such recipe"),
    ],
)
def test_refusals(folder, capsys, words, error):
    before = (folder / "bad.jsonl").read_bytes()
    assert main(["lint", *words]) == 2
    out, err = capsys.readouterr()
    assert error in err
    assert "wrote" not in out
    assert (folder / "bad.jsonl").read_bytes() == before


def test_a_target_without_a_template_is_named(folder, capsys):
    (folder / "target" / "chat_template.jinja").unlink()
    assert main(["lint", "good.jsonl", "--target", "target"]) == 2
    assert "the tokenizer has no chat template. Put the `chat_template.jinja`" in (
        capsys.readouterr().err
    )


def test_its_own_page_is_replaced(folder, capsys):
    for name, samples in (("good.jsonl", "60"), ("prompts.jsonl", "30")):
        assert main(["lint", name, "--target", "target"]) == 0
        assert re.search(rf"training +{samples} ", capsys.readouterr().out)
    assert "prompts" in (folder / "lint.html").read_text()


def test_files_of_one_name_are_told_apart(folder, capsys):
    (folder / "other").mkdir()
    source(folder / "other", "good", chats(5, 100))
    assert main(["lint", "good.jsonl", "other/good.jsonl", "--target", "target"]) == 0
    assert re.search(r"^other-good +training +5 ", capsys.readouterr().out, re.MULTILINE)
