"""The S3 server of demo/weed.py for tests, one per test process.

The fixture `s3` of conftest.py runs it: `with s3.credentials(): ObjectStore(s3.url("mine"),
s3.options)`.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

# Benchmarks and the torture import this too, and have the tests on their path alone.
sys.path.append(str(Path(__file__).resolve().parents[1] / "demo"))

import weed
from weed import BUCKET, OWNER, REGION, weed_binary

__all__ = ["BUCKET", "OWNER", "READER", "REGION", "Seaweed", "running_seaweed", "weed_binary"]

READER = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
"""May list and read, nothing else."""


class Seaweed(weed.Seaweed):
    """The server on free ports; a test takes a prefix of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, readers=[READER])

    @staticmethod
    def credentials(whose: Mapping[str, str] = OWNER) -> AbstractContextManager[None]:
        """The environment as a user of the store has it."""
        return weed.credentials(whose)


@contextmanager
def running_seaweed() -> Iterator[Seaweed]:
    """A server with a folder of its own, both gone at the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weed-"))
        server = Seaweed(Path(folder))
        stack.callback(server.kill)
        server.start()
        yield server


if __name__ == "__main__":
    with running_seaweed() as running:
        print(json.dumps({**running.options, "bucket": BUCKET, **OWNER}), flush=True)
        sys.stdin.read()
