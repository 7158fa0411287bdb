"""A target, and a server of command lines, that the tests of whole extractions share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from extract_runs import ROOMY, make_samples
from extract_trials import Prepared, prepare_run
from paceline.types import Sample
from run_server import RunServer
from seaweed import Seaweed
from tiny_models import tiny_model


@pytest.fixture(scope="session")
def small_target(tmp_path_factory) -> Path:
    """Five layers, 32 wide: 192 bytes a token of two taps and last in bf16."""
    return tiny_model("llama", tmp_path_factory.mktemp("target") / "llama", layers=5, hidden=32)


@pytest.fixture(scope="session")
def target(small_target: Path) -> Path:
    """The one that a module means that makes none of its own."""
    return small_target


@pytest.fixture
def samples() -> list[Sample]:
    """Forty, of 4 to 40 tokens."""
    return make_samples(40)


@pytest.fixture
def bucket(s3: Seaweed, tmp_path: Path) -> Iterator[dict[str, object]]:
    """What a recipe says of an object store of the test's own, with staging on its disk."""
    with s3.credentials():
        yield {
            "store": s3.url(f"extract/{tmp_path.name}"),
            "store_options": s3.options,
            "staging": str(tmp_path / "staging"),
            **ROOMY,
        }


@pytest.fixture(scope="session")
def server(tmp_path_factory, s3: Seaweed) -> Iterator[RunServer]:
    """Command lines with the credentials of the S3 server."""
    with s3.credentials(), RunServer(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, server: RunServer, small_target: Path) -> Prepared:
    """A run of 60 conversations, some 4,000 tokens, up to its extraction."""
    root = tmp_path_factory.mktemp("prepared") / "project"
    return prepare_run(server, small_target, root, samples=60)


@pytest.fixture(scope="session")
def broken_target(small_target: Path, tmp_path_factory) -> Path:
    """A target that makes no numbers of token 77."""
    folder = tmp_path_factory.mktemp("broken") / "llama"
    shutil.copytree(small_target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
