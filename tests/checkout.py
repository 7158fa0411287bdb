"""The repository that the tests run in: its files, and its scripts as modules."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def repository_files() -> list[Path]:
    """Files that are committed or would be, relative to ROOT."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    return [path for path in paths if (ROOT / path).is_file()]


def load_script(path: str) -> ModuleType:
    """A script of the repository as a module, without putting its folder on the path."""
    name = "script_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up by name while they are made.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
