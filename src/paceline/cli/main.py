"""`paceline`: finds the command, runs it, and turns what it raises into words and an exit code."""

import difflib
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.durable.errors import Interrupted, PacelineError, storage_refused
from paceline.flow.signals import sigterm_raises
from paceline.masking import masked_text
from paceline.watch.words import visible

COMMANDS: tuple[tuple[str, str], ...] = (
    ("init", "write a commented recipe for a target and data"),
    ("lint", "what `prepare` would make of data: masks, faults, lengths, before anything is run"),
    ("doctor", "what will go wrong, found before anything is loaded"),
    ("plan", "bytes, time, room and memory of a run, before anything is loaded"),
    ("run", "all stages in order: prepare, regenerate, extract, train, score"),
    ("prepare", "conversations to tokens with a loss mask"),
    ("regenerate", "the target answers the prompts itself"),
    ("extract", "the target's hidden states, kept on disk"),
    ("import", "hidden states that SpecForge or speculators computed, taken over"),
    ("train", "the drafter, from the hidden states"),
    ("score", "acceptance and speed of target and drafter, by decoding"),
    ("chat", "talk to the target with the drafter at work"),
    ("compare", "scores beside each other: which drafter yields more, and whether by chance"),
    ("status", "how a run stands, also after it has died"),
    ("verify", "what an extraction has made, shard by shard, and what is missing"),
    ("report", "a run on one page: curves, acceptance, text, corpus, recipe"),
    ("clean", "free what a run no longer needs: copies, leftovers, checkpoints, features"),
    ("stop", "end what is at work in a run directory, with proof"),
)

_MODULES = {"import": "import_features"}
"""Modules of commands that are called like a keyword of Python."""

_HELP = """\
usage: paceline COMMAND ...

Trains a drafter that lets a large language model decode several tokens per step.

Commands:
{commands}

  paceline COMMAND --help    what it reads and writes, with an example
  paceline --version

To start:
  paceline init --target MODEL_FOLDER --data chats.jsonl --out recipe.yaml
  paceline run recipe.yaml

A command that was stopped goes on where it was when it is started again; one that is complete
says so and does nothing.

Exit codes: 0 all done, 1 something failed, 2 what was asked for is impossible, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A stream that the caller closed (`>&-`) is None, and nobody reads what goes there.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character must not end a run of hours.
            stream.reconfigure(errors="backslashreplace")
    _log_to_stderr()
    # Read when torch loads: threads that spin while they wait starve the other workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Read when a text is encoded, one at a time: threads would only wait for each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with sigterm_raises():
            return _dispatch(arguments)
    except PacelineError as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("interrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does: nothing is wrong, nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        # Those that go on with what is there have said so.
        refused = storage_refused(error, goes_on=False)
        return _unexpected(error) if refused is None else _failed(refused)
    except Exception as error:  # noqa: BLE001  the last resort: named, shown and counted as failure
        return _unexpected(error)


def _failed(error: PacelineError) -> int:
    lead = "" if isinstance(error, Interrupted) else "error: "
    print(visible(masked_text(f"{lead}{error}")), file=sys.stderr)
    return error.exit_code


def _unexpected(error: Exception) -> int:
    print(masked_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    print(
        f"error: {type(error).__name__} was not expected: a fault in Paceline {__version__}, "
        "or in what it runs on. The lines above say where.",
        file=sys.stderr,
    )
    return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        rows = (f"  {name:<12}{summary}" for name, summary in COMMANDS)
        print(_HELP.format(commands="\n".join(rows)), end="")
        return 0
    name, *rest = arguments
    if name == "--version":
        print(f"paceline {__version__}")
        return 0
    if name not in dict(COMMANDS):
        print(f"error: {_unknown(name)} `paceline --help` lists all commands.", file=sys.stderr)
        return 2

    # tyro alone takes a fifth of a second: only a command pays for it.
    import tyro

    command = module_of(name)
    try:
        args = tyro.cli(command.Args, prog=f"paceline {name}", args=rest)
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 2
    return command.run(args)


def module_of(name: str) -> Any:
    """The module of a command, with its `Args` and `run`."""
    return importlib.import_module(f"paceline.cli.{_MODULES.get(name, name)}")


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"{name} comes before the command; options stand after it."
    near = difflib.get_close_matches(name, dict(COMMANDS), n=1)
    return f"no command {name!r}.{f' Did you mean {near[0]}?' if near else ''}"


class _Masking(logging.Formatter):
    """Lines without secrets or control characters, whichever error or path they tell of."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(masked_text(super().format(record)))


def _log_to_stderr() -> None:
    """Paceline's own log, from info upwards; other libraries keep Python's default."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Masking("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("paceline")
    for old in [h for h in logger.handlers if type(h) is logging.StreamHandler]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
