"""A server of command lines and an undisturbed run, for tests that disturb one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.recipe.run_dir import RunDir
from random_kills import Undisturbed, undisturbed
from run_server import RunServer
from tiny_run import tiny_project


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[RunServer]:
    with RunServer(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    return tiny_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def straight(tmp_path_factory, server, recipe) -> Undisturbed:
    return undisturbed(server, recipe, RunDir(tmp_path_factory.mktemp("straight") / "run"))
