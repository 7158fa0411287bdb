"""docs/operations.md and docs/paceline@.service say what is true of the code."""

import configparser
import dataclasses
import errno
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from checkout import ROOT
from paceline.cli.main import COMMANDS, main
from paceline.cli.stop import Args as StopArgs
from paceline.durable.errors import Interrupted, PacelineError, UserError
from paceline.flow.units import Policy
from paceline.recipe.schema import ExtractRecipe, Recipe, RegenerateRecipe
from paceline.target.served.pace import Pace

DOCUMENT = ROOT / "docs" / "operations.md"
UNIT = ROOT / "docs" / "paceline@.service"
TEXT = DOCUMENT.read_text()

HEADINGS = (
    "Before a run", "Data", "Plan", "While it runs", "After a boot", "Scores", "Exit codes",
    "Memory of a training", "Places", "Servers", "Several machines", "Object stores",
    "Online training", "Trackers", "Recovery", "House-keeping", "Torture",
)  # fmt: skip


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(paceline [^`]+)`", TEXT)
    return [shlex.split(line) for line in lines if line.startswith("paceline ")]


def unit() -> dict[str, dict[str, str]]:
    """Sections and keys; a key that comes twice is an error here."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return {name: dict(parser[name]) for name in parser.sections()}


def seconds(text: str) -> float:
    number, word = re.fullmatch(r"(\d+)(s|min|h|d)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[word]


def test_the_headings_that_others_cite_are_there():
    assert tuple(re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE)) == HEADINGS


@pytest.mark.parametrize("name", sorted({words[1] for words in commands()}))
def test_each_command_has_the_flags_that_are_shown(name, capsys):
    assert name in dict(COMMANDS)
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    flags = {word for words in commands() if words[1] == name for word in words if word[:2] == "--"}
    flags |= {f"--{word}" for word in re.findall(rf"`{name} --([a-z-]+)`", TEXT)}
    assert {flag for flag in flags if not re.search(rf"{flag}\b", shown)} == set()


def test_each_key_of_a_recipe_is_one():
    sections = {f.name: getattr(Recipe(), f.name) for f in dataclasses.fields(Recipe)}
    named = re.findall(r"`(extract|train|target|score|corpus|regenerate)\.([a-z_]+)", TEXT)
    assert len(named) > 10
    for section, key in named:
        assert hasattr(sections[section], key), f"{section}.{key}"


def test_the_numbers_are_the_defaults():
    asked, policy = ExtractRecipe(), Policy()
    assert (asked.high_mark, asked.low_mark) == (0.8, 0.7)
    assert "The defaults, 0.8 and 0.7," in TEXT
    assert asked.space_wait == 3600
    assert "`extract.space_wait` (an hour)" in TEXT
    assert asked.unit_retries == 2
    assert "Two\ndeaths or failures over one shard" in TEXT
    assert (policy.restarts, policy.restart_window) == (5, 600)
    assert "more than five times in ten minutes" in TEXT
    assert (policy.stuck_after, policy.kill_after) == (30, 300)
    assert "told after 30 seconds" in TEXT
    assert "killed after five minutes" in TEXT


def test_the_patience_with_servers_is_what_the_text_says():
    pace = Pace()
    assert RegenerateRecipe().server_wait == 3600
    assert "`regenerate.server_wait` (an hour)" in TEXT
    assert (pace.opens_after, pace.open_first, pace.open_longest) == (5, 1, 60)
    assert "five failures in a row" in TEXT
    assert "left alone for 1 s, then twice as long each time, up to a minute" in TEXT
    assert pace.first_rejections == 8
    assert "rejects the first 8 rows" in TEXT
    assert pace.grace == 15
    assert "SIGTERM gives them 15 seconds" in TEXT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_refused_write_is_told_in_the_words_of_the_table(number):
    assert os.strerror(number) in TEXT


def exit_codes() -> dict[str, str]:
    """The last column of the table by its first."""
    table = TEXT.partition("## Exit codes")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", row) for row in table.splitlines() if row.startswith("| ")]
    return {row[1].strip(): row[-2].strip() for row in rows[1:]}


def test_every_exit_code_is_in_the_table():
    kinds = [PacelineError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    raised = {str(kind.exit_code) for kind in kinds}
    assert {"0", "141", *raised} == set(exit_codes()) - {"killed by a signal"}


def test_the_unit_does_with_each_exit_code_what_the_table_says():
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"
    stays = {"0", *service["SuccessExitStatus"].split()}
    stays |= set(service["RestartPreventExitStatus"].split())
    assert stays == {"0", str(UserError.exit_code), str(Interrupted.exit_code)}
    said = {code for code, what in exit_codes().items() if what == "stays stopped"}
    assert said == stays
    assert Counter(exit_codes().values())["starts again"] == 3


def test_every_line_of_the_unit_is_explained():
    explained = TEXT.partition("## After a boot")[2].partition("\n## ")[0]
    shown = {key for section in ("Unit", "Service") for key in unit()[section]}
    for key in shown - {"Description", "ExecStart"}:
        assert re.search(rf"`{key}\b", explained), key


def test_the_unit_goes_on_with_a_run_from_its_folder_alone(tmp_path, monkeypatch, capsys):
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert program.startswith("/srv/")
    assert words == ["run", "--run", "/srv/paceline/runs/%i"]
    monkeypatch.chdir(tmp_path)
    assert main([*words[:-1], "runs/none"]) == UserError.exit_code
    assert "has no recipe.yaml yet" in capsys.readouterr().err


def test_the_unit_waits_as_long_as_stop_does_and_gives_up_after_lasting_failures():
    whole, service = unit()["Unit"], unit()["Service"]
    assert seconds(service["TimeoutStopSec"]) >= StopArgs(run=Path("x")).grace
    longest = ExtractRecipe().space_wait + seconds(service["RestartSec"])
    assert int(whole["StartLimitBurst"]) * longest < seconds(whole["StartLimitIntervalSec"])
    assert service["KillMode"] == "mixed"
    assert service["OOMPolicy"] == "continue"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path):
    # The template's paths and user are not those of this machine.
    text = re.sub(r"(?m)^(ExecStart=)\S+", r"\1/bin/true", UNIT.read_text())
    text = re.sub(r"(?m)^User=.*\n", "", text)
    path = tmp_path / UNIT.name
    path.write_text(text)
    done = verified(path)
    assert (done.returncode, done.stderr) == (0, "")
    path.write_text(text.replace("KillMode=mixed", "KillMode=mixt"))
    assert "mixt" in verified(path).stderr, "it would have said so"


def verified(path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )


def test_the_wait_for_devices_ends_at_once_without_one_and_else_with_the_driver(tmp_path):
    program, flag, script = shlex.split(unit()["Service"]["ExecStartPre"])
    assert (program, flag) == ("/bin/sh", "-c")
    buses = "/sys/bus/pci/devices/*/vendor"
    assert buses in script
    (tmp_path / "0000:00").mkdir()
    vendor = tmp_path / "0000:00" / "vendor"
    here = script.replace(buses, f"{tmp_path}/*/vendor").replace("sleep 5", "sleep 0.2")
    asked = tmp_path / "asked"
    driver = tmp_path / "nvidia-smi"
    # It answers from the third call on.
    driver.write_text(f'#!/bin/sh\necho x >> {asked}\n[ "$(wc -l < {asked})" -ge 3 ]\n')
    driver.chmod(0o755)

    def waited() -> int:
        if asked.exists():
            asked.unlink()
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(["sh", "-c", here], env={"PATH": path}, timeout=20, check=False)
        assert done.returncode == 0
        return len(asked.read_text().splitlines()) if asked.exists() else 0

    assert waited() == 0, "no device at all"
    vendor.write_text("0x8086\n")
    assert waited() == 0, "another maker's"
    vendor.write_text("0x10de\n")
    began = time.monotonic()
    assert waited() == 3
    assert time.monotonic() - began >= 0.4
