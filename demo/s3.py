"""A real S3 server on this machine: SeaweedFS, for recipes/extract-s3.yaml and your own tries.

    python demo/s3.py -- paceline run recipes/extract-s3.yaml --run runs/extract-s3
    python demo/s3.py

With a command: starts the server, runs the command with credentials in its environment, ends the
server, and exits with the command's code (128 and the signal's number where one killed it).
Without: runs until Ctrl-C and prints what another shell needs. What is stored stays in
.cache/s3/data, so the next start has it.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from paceline.durable.errors import PacelineError, UserError
from paceline.durable.owner import owned
from paceline.flow.signals import sigterm_raises

# Beside this file, whose folder Python puts on the path.
from weed import BUCKET, OWNER, Seaweed, die_with_parent, environment

PORT = 8333
"""That of recipes/extract-s3.yaml."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Start a local S3 server, for a command or until Ctrl-C.",
        usage="%(prog)s [--port PORT] [--folder DIR] [-- COMMAND ...]",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}")
    folder = Path(".cache", "s3")
    parser.add_argument("--folder", type=Path, default=folder, help=f"its data; default: {folder}")
    parser.add_argument("command", nargs="*", help="what to run while it is there")
    options = parser.parse_args(arguments)
    try:
        with sigterm_raises(), _serving(options.folder, options.port) as server:
            return _run(options.command) if options.command else _stay(server)
    except KeyboardInterrupt:
        return 130
    except (PacelineError, OSError) as error:
        print(f"s3: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, PacelineError) else 1


@contextmanager
def _serving(folder: Path, port: int) -> Iterator[Seaweed]:
    """The server, gone at the end however that comes."""
    server = Seaweed(folder, port=port)
    with ExitStack() as held:
        try:
            # Two servers over the same data would destroy it.
            held.enter_context(owned(folder, "demo/s3.py"))
        except UserError as error:
            raise UserError(
                f"{folder}: another demo/s3.py serves it. Take another --folder."
            ) from error
        try:
            server.start()
            where = f"{server.endpoint}, bucket {BUCKET}, data in {folder}"
            print(f"s3: SeaweedFS at {where}", file=sys.stderr, flush=True)
            yield server
        finally:
            server.kill()


def _run(command: Sequence[str]) -> int:
    """Run the command to its end; its exit code."""
    env = environment()
    # `paceline` is found where this Python has its programs, in an activated environment or not.
    env["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", os.defpath)])
    with _sigterm_kept() as asked:
        try:
            process = subprocess.Popen(
                command, env=env, preexec_fn=lambda: die_with_parent(signal.SIGTERM)
            )
        except OSError as error:
            raise UserError(f"{command[0]}: {error.strerror}") from error
        is_told = False
        while True:
            try:
                code = process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                if asked and not is_told:
                    is_told = True
                    process.send_signal(asked[0])
    return code if code >= 0 else 128 - code


def _stay(server: Seaweed) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    try:
        for name in sorted(name for name in os.environ if name.startswith("AWS_")):
            if name not in OWNER:
                print(f"unset {name}")
        for name, value in OWNER.items():
            print(f"export {name}={shlex.quote(value)}")
        print("# Put these lines into another shell. Ctrl-C ends the server.", flush=True)
        while server.is_running:
            time.sleep(0.2)
    except KeyboardInterrupt:
        return 0
    raise PacelineError(f"the server has ended by itself. {server.log} may say why.")


@contextmanager
def _sigterm_kept() -> Iterator[list[int]]:
    """While a command runs, it decides when to end: SIGTERM is noted, to be passed on.

    Ctrl-C goes from the terminal to both, and is the command's alone.
    """
    asked: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, note), signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


if __name__ == "__main__":
    sys.exit(main())
