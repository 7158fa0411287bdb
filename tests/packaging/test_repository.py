"""Promises that the repository makes about itself: documents, sizes, paths."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT, repository_files

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADING = re.compile(r"^#+ +(.+?)\s*$", flags=re.MULTILINE)

MACHINE_PATHS = re.compile(
    r"(?<![\w./-])/(?:home|root|work|opt|Users|mnt)/\w|/tmp/[\w.]|\.library[/]"
)
REGISTRY_HOSTS = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch")


def code_of(document: Path) -> list[str]:
    """Lines of the fenced blocks, and inline code."""
    text = document.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in block.splitlines()] + re.findall(
        r"`([^`\n]+)`", text
    )


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def paceline_commands() -> set[str]:
    found = set()
    for line in code_of(ROOT / "README.md"):
        found |= set(re.findall(r"^\s*(?:\.venv/bin/)?paceline ([a-z]+)\b", line))
    return found


def test_readme_names_the_two_commands():
    lines = code_of(ROOT / "README.md")
    assert "make test" in lines
    assert "make demo" in lines


def test_documented_make_targets_exist():
    targets = make_targets()
    for document in DOCUMENTS:
        for line in code_of(document):
            for target in re.findall(r"^\s*make ([a-z][a-z0-9-]*)", line):
                assert target in targets, f"{document.name}: make {target}"


def test_documented_commands_exist():
    commands = paceline_commands()
    assert {"init", "run"} <= commands
    for command in sorted(commands):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", command, "--help"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"paceline {command} --help:\n{done.stderr}"
        assert command in done.stdout


def test_ci_runs_the_tests_that_the_readme_names():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_headings_that_the_code_cites_exist():
    cited = set()
    for path in ROOT.glob("src/**/*.py"):
        text = " ".join(path.read_text().split())
        for name, heading in re.findall(r"docs/(\w+\.md)(?:[,:]? \"([^\"]+)\")?", text):
            cited.add((name, heading))
    assert ("architecture.md", "Layer ids") in cited
    for name, heading in cited:
        headings = HEADING.findall((ROOT / "docs" / name).read_text())
        assert not heading or heading in headings, f"docs/{name} has no heading {heading!r}"


def test_each_documented_pitfall_has_a_test_of_its_number():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    documented = {int(n) for n in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)}
    tested = set()
    for path in ROOT.glob("tests/**/*.py"):
        tested |= {int(n) for n in re.findall(r"(?m)^\s*def test_pitfall_(\d+)_", path.read_text())}
    assert documented
    assert documented - tested == set(), "documented as caught, and no test says so"


def test_no_source_file_is_longer_than_400_lines():
    lengths = {p: len(p.read_text().splitlines()) for p in ROOT.glob("src/**/*.py")}
    assert lengths
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > 400} == {}


def test_no_file_names_a_path_of_one_machine_or_a_registry():
    found = []
    for path in repository_files():
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line):
                found.append(f"{path}:{number}: {line.strip()[:80]}")
    assert found == []


@pytest.mark.parametrize("line", ["cd /ro" + "ot/x", 'Path("/ho' + 'me/me/run")', "/tm" + "p/w/dl"])
def test_the_search_for_machine_paths_can_see(line):
    assert MACHINE_PATHS.search(line)
