"""A word that tells a run directory from every other one, also from those of the same path."""

import uuid
from pathlib import Path

from paceline.durable.fs import REAL_FS, FileSystem, write_atomic

RUN_ID = "run.id"
"""Its file in the run directory."""


def read_run_id(run_root: Path) -> str:
    """The id of the run at `run_root`; empty where it has none, or where there is no run.

    Raises OSError where it cannot be seen whether there is one.
    """
    try:
        return (run_root / RUN_ID).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""


def claim_run_id(run_root: Path, *, anew: bool = False, fs: FileSystem = REAL_FS) -> str:
    """The id of the run at `run_root`, made where it has none, or `anew` for a copy of a run.

    It is random and stays: paths, host names, process ids and inodes are the same in two
    containers, or change with a boot. Raises OSError where it cannot be read or written.
    """
    found = "" if anew else read_run_id(run_root)
    if not found:
        found = uuid.uuid4().hex
        write_atomic(run_root / RUN_ID, found.encode(), fs=fs)
    return found
