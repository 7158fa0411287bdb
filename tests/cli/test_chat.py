"""`paceline chat`: a conversation through a pipe."""

import io

import pytest
import torch
from rich.console import Console

from drafting import load_tiny_target, tiny_drafter
from paceline.cli.chat_screen import TerminalScreen, Turn
from paceline.cli.main import main
from paceline.decode import speculate
from paceline.decode.speculate import decode_plain
from paceline.decode.text import GrowingText
from paceline.drafter.checkpoint import save_drafter
from paceline.durable.errors import UserError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import DrafterRecipe, Recipe, ScoreRecipe, TargetRecipe
from paceline.recipe.stage import StageRecord
from paceline.recipe.write import adopt_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    target = load_tiny_target(root)
    recipe = Recipe(
        target=TargetRecipe(path=str(target.folder)),
        drafter=DrafterRecipe(block_size=4),
        score=ScoreRecipe(budgets=(4,)),
    )
    run_dir = RunDir(root / "run")
    run_dir.checkpoints.mkdir(parents=True)
    adopt_recipe(recipe, run_dir)
    best = run_dir.checkpoints / "step_000001"
    best.mkdir()
    save_drafter(tiny_drafter(target), best)
    record = StageRecord(run_dir.checkpoints, "train", {"made": "by the test"})
    record.begin()
    record.finish([best / "model.safetensors"], {"best": best.name})
    return target, root / "run"


def say(monkeypatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def plain_ids(target, messages, count: int) -> tuple[list[int], list[int]]:
    """Prompt and answer."""
    tokenizer = target.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    plain = decode_plain(
        target,
        prompt,
        taps=(1, 2, 3),
        max_new_tokens=count,
        eos_ids=frozenset(target.spec.eos_token_ids),
    )
    return prompt, list(plain.ids)


def answer_of(target, messages, count: int) -> str:
    _, ids = plain_ids(target, messages, count)
    return target.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("budget", [[], ["--budget", "0"]])
def test_the_answers_are_the_targets_own_and_turns_build_on_each_other(
    trained, monkeypatch, capsys, budget
):
    target, run = trained
    say(monkeypatch, "hello\n\nand now?\n/new\nhello\n")
    code = main(["chat", str(run), "--plain", "--max-new-tokens", "12", *budget])
    said = capsys.readouterr()
    assert code == 0
    first = answer_of(target, [{"role": "user", "content": "hello"}], 12)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and now?"},
    ]
    second = answer_of(target, messages, 12)
    assert said.out == f"{first}\n{second}\n{first}\n"
    assert said.err.count("τ ") == 3


class _Oracle:
    """Drafts the target's own answer, so that every round commits a whole block."""

    def __init__(self, vocab: int, answer: list[int]) -> None:
        self._vocab, self._answer = vocab, answer
        self.length = 0

    def __call__(self, *_):
        self.length = 0
        return self

    def extend(self, taps) -> None:
        self.length += taps.shape[0]

    def slot_logits(self, _anchor):
        logits = torch.zeros(3, self._vocab)
        for slot in range(3):
            logits[slot, self._answer[self.length + 1 + slot]] = 10.0
        return logits


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8, 9])
def test_an_answer_is_as_long_as_asked_for_whatever_a_round_commits(
    trained, monkeypatch, capsys, count
):
    target, run = trained
    messages = [{"role": "user", "content": "hello"}]
    prompt, ids = plain_ids(target, messages, 16)
    oracle = _Oracle(target.spec.vocab_size, [*prompt, *ids])
    monkeypatch.setattr(speculate, "DraftSession", oracle)
    say(monkeypatch, "hello\n")
    options = ["--budget", "0", "--max-new-tokens", str(count)]
    assert main(["chat", str(run), "--plain", *options]) == 0
    text = target.tokenizer.decode(ids[:count], skip_special_tokens=True)
    assert capsys.readouterr().out == f"{text}\n"


def test_what_is_drawn_depends_on_the_seed(trained, monkeypatch, capsys):
    _, run = trained
    answers = []
    for seed in ("1", "1", "2"):
        say(monkeypatch, "hello\n")
        options = ["--temperature", "1", "--seed", seed, "--max-new-tokens", "12"]
        assert main(["chat", str(run), "--plain", *options]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "temperature -1.0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--max-new-tokens", "600"], "Begin another with /new"),
    ],
)
def test_what_cannot_be_is_said(trained, monkeypatch, capsys, options, said):
    _, run = trained
    say(monkeypatch, "hello\n")
    assert main(["chat", str(run), "--plain", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_run_or_a_drafter_is_told(trained, tmp_path, capsys):
    assert main(["chat", str(tmp_path), "--plain"]) == 2
    assert "no run directory" in capsys.readouterr().err
    _, run = trained
    (tmp_path / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    assert main(["chat", str(tmp_path), "--plain"]) == 2
    assert "paceline train" in capsys.readouterr().err


def test_text_grows_by_whole_characters(trained):
    target, _ = trained
    text = "häß → 你好 🙂"
    growing = GrowingText(target.tokenizer)
    pieces = [growing.add(token) for token in target.tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces, "a character of several tokens waits for its last"
    assert growing.add(240) == ""
    assert growing.end() == "\ufffd"


def test_a_terminal_colours_by_depth_and_goes_on_after_a_refusal():
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, color_system="standard", width=80, highlight=False
    )
    screen = TerminalScreen(console)
    screen.ready("a chain of 3")
    screen.refuse(UserError("the conversation is [too] long"))
    screen.begin()
    screen.show(Turn((("plain ", 0), ("one ", 1), ("far", 99)), 2, 5, 0.1, 1.0))
    screen.end()
    shown = out.getvalue()
    assert "a chain of 3" in shown
    assert "the conversation is [too] long" in shown
    assert "\x1b[36mone " in shown, "depth 1 in cyan"
    assert "\x1b[35mfar" in shown, "what is deeper has the last colour"
    assert "τ 2.50" in shown


def test_a_turn_says_how_it_goes():
    turn = Turn((("a", 0),), rounds=4, tokens=10, first=0.5, seconds=2.0)
    assert turn.summary == "τ 2.50 in 4 rounds, 5.0 tokens/s, the first token after 0.50 s"
    assert "first token after" in Turn((), 0, 0, 0.5, 0.0).summary
