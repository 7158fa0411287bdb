"""The page of a run: of a finished one, of one that stands at any stage, and of damaged ones."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest
from tokenizers import Tokenizer

import paceline
from paceline.cli.main import main
from paceline.durable.errors import IntegrityError, UserError
from paceline.durable.owner import owned
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import StageRecord, read_record
from paceline.report.collect import collect
from paceline.report.text import sample_text
from paceline.report.write import is_current, write_report
from paceline.status import run_status
from report_pages import HOSTILE, Page, page_of, report_project

SECTIONS = {
    "tau", "depth", "datasets", "speed", "lossless", "text", "training", "corpus", "quarantine",
    "timings", "recipe", "provenance",
}  # fmt: skip
STAGES = ["prepare", "regenerate", "extract", "train", "score"]


@dataclass
class Finished:
    """A finished run, and its page after each stage."""

    recipe: Path
    run: Path
    pages: dict[str, Page]

    @property
    def page(self) -> Page:
        return self.pages["run"]

    @property
    def result(self) -> dict:
        return json.loads((self.run / "score" / "result.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    root = tmp_path_factory.mktemp("project")
    recipe, run = report_project(root), root / "run"
    pages = {}
    for stage in STAGES:
        assert main([stage, str(recipe), "--run", str(run)]) == 0
        if stage != "score":  # which writes it itself
            assert main(["report", str(run)]) == 0
        pages[stage] = page_of(run / "report.html")
    assert main(["run", str(recipe), "--run", str(run)]) == 0
    pages["run"] = page_of(run / "report.html")
    return Finished(recipe, run, pages)


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return shutil.copytree(finished.run, tmp_path / "run")


def events(run: Path, kind: str) -> list[dict]:
    lines = (run / "events" / "train.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_a_finished_run_has_every_section_and_chart(finished):
    page = finished.page
    assert page.ids >= SECTIONS
    assert {*page.figures} == {
        "tau", "reached", "kept", "loss", "learning-rate", "gradient-norm", "simulated",
    }  # fmt: skip
    assert re.search(r"finished\s+20", page.words), "the state, and when it was at work"
    for missing in ("Not measured", "Not prepared", "Not answered", "No step"):
        assert missing not in page.words


def test_every_chart_says_in_words_what_it_shows(finished):
    charts = [given for _, given in finished.page.tags if given.get("class") == "chart"]
    assert len(charts) == len(finished.page.figures)
    assert all(given["role"] == "img" and len(given["aria-label"]) > 40 for given in charts)


def test_plotly_knows_every_property_of_every_figure(finished):
    for figure in finished.page.figures.values():
        go.Figure(figure)  # raises ValueError for one that it does not know


def test_the_figures_hold_the_numbers_of_the_result(finished):
    figures, pooled = finished.page.figures, finished.result["pooled"]
    *stack, dots = figures["tau"]["data"]
    assert dict(zip(dots["y"], dots["x"], strict=True)) == {n: p["tau"] for n, p in pooled.items()}
    for method, interval in zip(dots["y"], dots["customdata"], strict=True):
        assert interval == pooled[method]["tau_interval"]
        height = sum(bar["x"][bar["y"].index(method)] for bar in stack)
        assert height == pytest.approx(pooled[method]["tau"])
    for trace in figures["reached"]["data"]:
        shares = pooled[trace["name"]]["by_depth"]
        assert trace["y"][: len(shares)] == shares
        assert not any(trace["y"][len(shares) :])
        (kept,) = (t for t in figures["kept"]["data"] if t["name"] == trace["name"])
        product = 1.0
        for share, given in zip(trace["y"], kept["y"], strict=True):
            product *= given or 0.0
            assert product == pytest.approx(share)


def test_the_curves_hold_the_numbers_of_the_events(finished):
    figures, steps = finished.page.figures, events(finished.run, "step")
    for name, key in (
        ("loss", "loss"),
        ("learning-rate", "learning_rate"),
        ("gradient-norm", "gradient_norm"),
    ):
        trace = figures[name]["data"][0]
        assert trace["x"] == [event["step"] for event in steps]
        assert trace["y"] == [event[key] for event in steps]
    found = {(t["name"], x): y for t in figures["simulated"]["data"]
             for x, y in zip(t["x"], t["y"], strict=True)}  # fmt: skip
    assert found == {
        (method, event["step"]): tau
        for event in events(finished.run, "evaluation")
        for method, tau in event["simulated_tau"].items()
    }


def test_the_page_loads_nothing_and_forbids_it(finished):
    for tag, given in finished.page.tags:
        loads = [given.get(name) for name in ("src", "srcset", "href", "data", "poster", "action")]
        assert all(url is None or url.startswith(("#", "data:")) for url in loads), (tag, given)
    (style,) = re.findall(r"<style>(.*?)</style>", finished.page.source, re.DOTALL)
    assert not re.search(r"@import|url\(", style)
    (policy,) = (g["content"] for t, g in finished.page.tags if t == "meta" and "http-equiv" in g)
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_whatever_comes_from_data_is_escaped(finished):
    scripts = [given for tag, given in finished.page.tags if tag == "script"]
    assert sum("data-chart" not in given for given in scripts) == 2, "Plotly's and the page's own"
    assert "<script>alert" not in finished.page.source
    assert HOSTILE in finished.page.words, "as a data set's name"
    assert f"no JSON: {HOSTILE}" in finished.page.words, "as a row in quarantine"


def test_the_coloured_tokens_are_the_answers(finished):
    folder = Path(json.loads(finished.recipe.read_text())["target"]["path"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = {
        tokenizer.decode(prompt["answer_ids"], skip_special_tokens=False)
        for prompt in finished.result["prompts"]
    }
    shown = ["".join(text for _, text in pieces) for pieces in finished.page.tokens]
    assert len(shown) == 6, "three prompts, each as chain and as tree"
    assert {*shown} == answers


def test_the_colours_are_those_of_the_rounds(finished):
    text = sample_text(collect(RunDir(finished.run)))
    prompts = {prompt["prompt_id"]: prompt for prompt in finished.result["prompts"]}
    decodings = [(s.score.prompt_id, d) for s in text.prompts for d in s.decodings]
    assert [[(p.css, p.text) for p in d.pieces] for _, d in decodings] == finished.page.tokens
    assert {d.method for _, d in decodings} == {"chain", "ddtree-64"}
    for prompt_id, decoding in decodings:
        rounds = prompts[prompt_id]["methods"][decoding.method]["rounds"]
        first, *rest = [origin for piece in decoding.pieces for origin in piece.origins]
        assert first.kind == "first"
        for number, size in enumerate(rounds, start=1):
            depths = [o.depth for o in rest if o.round == number]
            whole = [*range(1, size), 0]  # 0: the target's own, at the end
            assert depths == whole or (number == len(rounds) and depths == whole[: len(depths)])


def test_corpus_and_quarantine_are_counted(finished):
    record = json.loads((finished.run / "corpus" / "prepare.stage.json").read_text())["report"]
    assert record["quarantined"] == 1
    for count in (record["read"], record["accepted"]):
        assert re.search(rf"(?<!\d){count}(?!\d)", finished.page.words)
    assert "1 × bad_json" in finished.page.words
    assert "train.jsonl, row 18" in finished.page.words


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_run_that_stands_anywhere_is_shown_and_what_is_missing_is_said(finished, stage):
    page = finished.pages[stage]
    done = STAGES[: STAGES.index(stage) + 1]
    assert page.ids >= SECTIONS
    assert page.words.count("Not measured yet") == 5
    assert ("Not answered yet" in page.words) == ("regenerate" not in done)
    assert ("No step is recorded yet" in page.words) == ("train" not in done)
    assert f"{STAGES[len(done)]} has not begun" in page.words
    assert {*page.figures} == (
        {"loss", "learning-rate", "gradient-norm", "simulated"} if "train" in done else set()
    )


def test_score_writes_the_page_too(finished):
    assert "tau" in finished.pages["score"].figures


def test_a_run_that_has_only_its_recipe(finished, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    shutil.copy(finished.run / "recipe.yaml", tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'page.html'}\n"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["recipe.yaml"]
    page = page_of(tmp_path / "page.html")
    assert page.ids >= SECTIONS
    assert "prepare has not begun" in page.words


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no run lies here" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_no_report_is_not_replaced(copy, tmp_path, capsys):
    (tmp_path / "thesis.html").write_text("mine")
    assert main(["report", str(copy), "--out", str(tmp_path / "thesis.html")]) == 2
    assert "is no report that paceline wrote" in capsys.readouterr().err
    assert (tmp_path / "thesis.html").read_text() == "mine"
    assert main(["report", str(copy), "--out", str(tmp_path)]) == 2
    assert "a folder. Name a file" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_result_is_named(copy, capsys, damage):
    path = copy / "score" / "result.json"
    text = path.read_text()
    path.write_text(text[:-40] if damage == "cut" else text.replace('"prompts": 3', '"prompts": 4'))
    assert path.read_text() != text
    with pytest.raises(IntegrityError, match=r"result\.json: not the result that was written"):
        write_report(RunDir(copy))
    assert main(["report", str(copy)]) == 1
    assert "`paceline score` again" in capsys.readouterr().err


def test_a_result_of_an_unfinished_score_must_still_be_a_result(copy):
    (copy / "score" / "score.stage.json").unlink()
    (copy / "score" / "result.json").write_text('{"pooled": 3}')
    with pytest.raises(IntegrityError, match="pooled"):
        write_report(RunDir(copy))


def test_a_number_that_is_not_finite_is_a_dash(copy):
    (copy / "score" / "score.stage.json").unlink()
    result = json.loads((copy / "score" / "result.json").read_text())
    for pooled in result["pooled"].values():
        pooled |= {"tau": None, "tau_interval": [None, None], "by_depth": []}
    result["cost"]["chain"] = dict.fromkeys(result["cost"]["chain"], None) | {"projected": {}}
    (copy / "score" / "result.json").write_text(json.dumps(result))
    page = page_of(write_report(RunDir(copy)))
    assert page.ids >= SECTIONS
    assert "has not come to its end" in page.words
    assert "–" in page.words
    assert "nan" not in page.words.lower().split()


def test_an_answer_that_is_not_the_targets_own_is_told_first(copy):
    (copy / "score" / "score.stage.json").unlink()
    result = json.loads((copy / "score" / "result.json").read_text())
    result["lossless"]["violations"] = ["abc/chain@3"]
    (copy / "score" / "result.json").write_text(json.dumps(result))
    words = page_of(write_report(RunDir(copy))).words
    assert "no number of this score can be trusted" in words
    assert "abc/chain@3" in words


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(copy):
    with (copy / "events" / "train.jsonl").open("ab") as file:
        file.write(b'{"v":2,"t":1,"ki\n\xff\xfe\n{"t":5.0,"kind":"ste')
    with (copy / "corpus" / "prepare.stage.json").open("r+") as file:
        record = json.load(file)
        assert record["report"]["reasons"] == {"bad_json": 1}
    (copy / "corpus" / "quarantine.jsonl").write_bytes(b"no JSON\n")
    (copy / "recipe.yaml").write_text("name: [broken\n<b>")
    page = page_of(write_report(RunDir(copy)))
    assert "events/train.jsonl: 2 lines cannot be read" in page.words
    assert "corpus/quarantine.jsonl: 1 line cannot be read" in page.words
    assert "The recipe cannot be understood" in page.words
    assert "<b>" in page.words
    assert "1 × bad_json" in page.words
    assert "does not say which tokenizer" in page.words
    assert {"loss", "tau"} <= {*page.figures}


def test_without_the_target_the_text_is_missing_and_says_why(copy):
    recipe = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(re.sub(r"(?m)^  path: .*$", "  path: gone", recipe, count=1))
    page = page_of(write_report(RunDir(copy)))
    assert page.tokens == []
    assert "The text needs the target’s tokenizer" in page.words.replace("'", "’")


@pytest.mark.parametrize("ending", ["failed", "interrupted", ""])
def test_how_an_unfinished_run_ended_is_said(copy, ending):
    path = copy / "score" / "score.stage.json"
    record = json.loads(path.read_text())
    path.unlink()
    (copy / "score" / "result.json").unlink()
    with (copy / "events" / "score.jsonl").open("ab") as file:
        event = {"v": 2, "t": 2e9, "pid": 1, "kind": ending or "progress"}
        file.write(msgspec.json.encode(event | ({"error": "x < y"} if ending else {})) + b"\n")
    lock = {"pid": 2**22 + 1, "host": os.uname().nodename, "since": 1.0, "doing": "paceline run"}
    (copy / "owner.lock").write_text(json.dumps(lock))
    words = page_of(write_report(RunDir(copy))).words
    assert (f"{ending} in score" if ending else "died before score") in words
    assert ("x < y" in words) == bool(ending)
    assert record["stage"] == "score"


def test_a_run_at_work_says_so(copy):
    with owned(copy, "paceline train"):
        words = page_of(write_report(RunDir(copy))).words
    assert re.search(r"running\s+paceline train since 2", words)


def test_the_page_has_the_words_of_status(copy, capsys):
    (copy / "features" / "extract.stage.json").unlink()
    assert main(["train", "--run", str(copy)]) == 2
    shutil.rmtree(copy / "corpus")
    page = page_of(write_report(RunDir(copy)))
    status = run_status(copy)
    for stage in status.stages:
        assert re.search(rf"\n{stage.name}{stage.state}", page.words), stage
    assert re.search(rf"{status.state} (in|before) |{status.state} .* has not begun", page.words)


def test_a_score_of_another_drafter_is_said_to_be_outdated(copy):
    record = read_record(copy / "score", "score")
    rewritten = StageRecord(copy / "score", "score", record.fields | {"drafter": "another"},
                            allowed=["drafter"])  # fmt: skip
    rewritten.begin()
    rewritten.finish([copy / "score" / "result.json"], record.report)
    words = page_of(write_report(RunDir(copy))).words
    assert "The score that is shown measured another drafter than the one chosen now." in words
    assert "score is outdated" in words


def test_where_nothing_is_held_out_the_page_says_what_the_prompts_are(copy, finished):
    assert "held-out prompts" in finished.page.words
    assert "also chose the checkpoint" not in finished.page.words
    record = read_record(copy / "corpus", "prepare")
    outputs = [copy / "corpus" / name for name in record.outputs]
    samples = record.report["samples"] | {"heldout": 0}
    rewritten = StageRecord(copy / "corpus", "prepare", record.fields)
    rewritten.begin()
    rewritten.finish(outputs, record.report | {"samples": samples})
    words = page_of(write_report(RunDir(copy))).words
    assert "over 3 validation prompts, which also chose the checkpoint" in words
    assert "they are validation prompts, which also chose the checkpoint" in words
    assert "How validation answers came about" in words
    assert "held-out" not in words


def test_it_says_by_what_the_shown_prompts_are_chosen(finished):
    text = sample_text(collect(RunDir(finished.run)))
    assert text.method in ("ddtree-64", "ddtree-256")
    assert f"prompts of median, best and worst τ of {text.method}" in finished.page.words
    assert f"The median prompt, by the τ of {text.method}" in finished.page.words


def test_an_interval_of_a_single_prompt_is_a_dash(copy):
    (copy / "score" / "score.stage.json").unlink()
    result = json.loads((copy / "score" / "result.json").read_text())
    for pooled in result["pooled"].values():
        pooled["tau_interval"] = [pooled["tau"]] * 2
    for found in result["datasets"].values():
        for pooled in found.values():
            pooled["tau_interval"] = [pooled["tau"]] * 2
    (copy / "score" / "result.json").write_text(json.dumps(result))
    page = page_of(write_report(RunDir(copy)))
    assert not re.search(r"\d\.\d+ to \d", page.words)
    (label,) = (g["aria-label"] for _, g in page.tags if g.get("id") == "chart-tau")
    assert "95 %" not in label
    dots = page.figures["tau"]["data"][-1]
    assert not any("customdata" in template for template in dots["hovertemplate"])


def test_methods_stand_by_their_budgets(copy):
    (copy / "score" / "score.stage.json").unlink()
    result = json.loads((copy / "score" / "result.json").read_text())
    result["pooled"] = dict(sorted(result["pooled"].items(), reverse=True))
    (copy / "score" / "result.json").write_text(json.dumps(result))
    words = page_of(write_report(RunDir(copy))).words
    rows = re.findall(r"\n(chain|ddtree-\d+)(?:decoded|walk)", words)
    assert rows == ["chain", "ddtree-64", "ddtree-256"]


def test_a_report_that_cannot_be_written_is_not_done(copy, finished, capsys):
    (copy / "report.html").unlink()
    (copy / "report.html").mkdir()
    assert main(["run", str(finished.recipe), "--run", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "not done: report: " in out
    assert "finished, with parts not done" in out


def test_a_fault_of_the_page_is_told_apart_from_the_run(copy, finished, capsys, monkeypatch):
    def broken(run_dir: RunDir) -> Path:
        raise KeyError("by_depth")

    monkeypatch.setattr("paceline.report.write.write_report", broken)
    assert main(["score", str(finished.recipe), "--run", str(copy)]) == 1
    told = capsys.readouterr()
    assert "not done: report: KeyError: 'by_depth' (a fault in Paceline" in told.out
    assert "Traceback" in told.err


def test_where_nothing_can_be_written_the_report_that_is_there_stands(copy, finished, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("paceline.report.write.write_atomic", full)
    newest = time.time() + 3600
    os.utime(copy / "report.html", (newest, newest))
    assert is_current(RunDir(copy))
    assert main(["run", str(finished.recipe), "--run", str(copy)]) == 0
    os.utime(copy / "report.html", (1, 1))
    assert not is_current(RunDir(copy))
    assert main(["run", str(finished.recipe), "--run", str(copy)]) == 1


def test_the_write_is_atomic(copy, monkeypatch):
    before = (copy / "report.html").read_bytes()

    def torn(self: object, file: object, data: bytes) -> None:
        file.write(data[: len(data) // 2])  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.durable.fs.RealFileSystem.write", torn)
    with pytest.raises(OSError, match="No space"):
        write_report(RunDir(copy))
    assert (copy / "report.html").read_bytes() == before
    assert not [*copy.glob("*.partial")]


def test_the_command_needs_no_torch(finished, tmp_path):
    program = (
        "import sys\nfrom paceline.cli.main import main\ncode = main(sys.argv[1:])\n"
        "heavy = sorted({'torch', 'transformers'} & sys.modules.keys())\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", str(finished.run), "--out", "page.html"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()


def test_no_run_is_an_error_of_the_user(tmp_path):
    with pytest.raises(UserError):
        write_report(RunDir(tmp_path / "nothing"))
