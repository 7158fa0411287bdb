from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from answer_server import AnswerServer, Faults, Nursery
from paceline.recipe.run_dir import RunDir
from regenerate_world import ENDS, make_prepared, make_target


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that ends its answers at ENDS, and in both ways."""
    return make_target(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts processes without a wait."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def serve(tmp_path: Path, toy: Path, nursery: Nursery) -> Iterator[Callable[..., AnswerServer]]:
    """Starts servers of the toy, with the faults that are named, and ends them."""
    servers: list[AnswerServer] = []

    def start(target: Path = toy, **faults: Any) -> AnswerServer:
        asked = Faults(**{"ends": ENDS, **faults})
        server = AnswerServer(nursery, target, tmp_path / f"server-{len(servers)}.log", asked)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def prepared(tmp_path: Path, toy: Path) -> Callable[..., RunDir]:
    """Makes runs with a prepared corpus."""

    def prepare(name: str = "run", target: Path = toy, **options: Any) -> RunDir:
        run_dir = RunDir(tmp_path / name)
        make_prepared(run_dir, target, **options)
        return run_dir

    return prepare
