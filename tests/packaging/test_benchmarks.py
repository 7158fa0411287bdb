"""benchmarks/run.py: one JSON line a measurement, whatever happens inside one."""

import json
import shutil
import subprocess
import sys

import pytest

from checkout import ROOT, load_script

GOOD = """
def measure():
    print("noise")
    return {"name": "overfit", "value": 8.0, "unit": "u", "target": 8, "ok": True, "how": "h"}
"""
TWO = """
def measure():
    line = {"value": 1, "unit": "u", "target": 2, "ok": False, "how": "h"}
    return [line | {"name": "a"}, line | {"name": "b"}]
"""


@pytest.fixture
def benchmarks(tmp_path):
    """Run the real runner beside modules of the test's own; returns exit code and lines."""
    shutil.copy(ROOT / "benchmarks" / "run.py", tmp_path)

    def run(modules, *arguments):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, str(tmp_path / "run.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_prints_a_line_for_each_and_exits_with_0(benchmarks):
    every = load_script("benchmarks/run.py").BENCHMARKS
    modules = dict.fromkeys(every, "raise SystemExit(3)") | {"overfit": GOOD, "demo_tau": TWO}
    code, lines = benchmarks(modules)
    assert code == 0
    assert [line["name"] for line in lines] == ["a", "b", *every[1:]]
    assert lines[2] == json.loads(
        '{"name": "overfit", "value": 8.0, "unit": "u", "target": 8, "ok": true, "how": "h"}'
    )
    assert lines[3]["ok"] is False
    assert lines[3]["how"] == "SystemExit: 3"


def test_only_one(benchmarks):
    code, lines = benchmarks({"overfit": GOOD}, "--only", "overfit")
    assert code == 0
    assert [line["name"] for line in lines] == ["overfit"]


def test_one_takes_what_it_is_given(benchmarks):
    takes = GOOD.replace("measure()", "measure(demo, epochs='2')").replace(
        '"how": "h"', '"how": f"{demo}/{epochs}"'
    )
    asked = ("--only", "overfit", "demo=runs/a=b")
    _, lines = benchmarks({"overfit": takes}, *asked)
    assert lines[0]["how"] == "runs/a=b/2"
    _, lines = benchmarks({"overfit": takes}, *asked, "epochs=0.1")
    assert lines[0]["how"] == "runs/a=b/0.1"
    _, lines = benchmarks({"overfit": takes}, *asked, "epoch=1")
    assert lines[0]["ok"] is False
    assert "epoch" in lines[0]["how"]


def test_values_without_a_name_are_refused(benchmarks):
    assert benchmarks({"overfit": GOOD}, "epochs=1") == (2, [])


def test_peers_and_long_ones_are_run_by_name_alone():
    script = load_script("benchmarks/run.py")
    assert script.PEERS
    for name in script.PEERS + script.LONG:
        assert name not in script.BENCHMARKS
        assert (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file()


def test_peers_are_measured_with_our_own_torch():
    ours, theirs = (
        dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
        for name in ("constraints.txt", "benchmarks/peers/requirements.txt")
    )
    shared = (ours.keys() & theirs.keys()) - {"transformers"}
    assert {"numpy", "torch"} <= shared
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace('"unit": "u", ', ""),
        GOOD.replace("8.0", "float('nan')"),
        GOOD.replace("8.0", "object()"),
    ],
)
def test_a_malformed_measurement_is_a_line_that_is_not_ok(benchmarks, text):
    code, lines = benchmarks({"overfit": text}, "--only", "overfit")
    assert code == 0
    assert [(line["name"], line["ok"]) for line in lines] == [("overfit", False)]


def test_an_unknown_name_is_refused(benchmarks):
    code, lines = benchmarks({}, "--only", "overfitt")
    assert (code, lines) == (2, [])


@pytest.mark.parametrize(
    ("chain", "tree", "ok"),
    [(1.2, 1.6, [True, True, True]), (1.19, 1.7, [False, True, False])],
)
def test_demo_tau_reads_the_score(tmp_path, chain, tree, ok):
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"pooled": {"chain": {"tau": chain}, "ddtree-32": {"tau": tree}}}))
    lines = load_script("benchmarks/demo_tau.py").measure(result)
    assert [line["name"] for line in lines] == ["demo_tau_chain", "demo_tau_ddtree32", "demo_tau"]
    assert [line["ok"] for line in lines] == ok
    assert [line["value"] for line in lines[:2]] == [chain, tree]


def test_demo_tau_without_a_run_says_what_to_do(tmp_path):
    lines = load_script("benchmarks/demo_tau.py").measure(tmp_path / "absent.json")
    assert [line["ok"] for line in lines] == [False, False, False]
    assert {line["how"] for line in lines} == {"run make demo first"}
