"""The wheel alone, in an environment that holds nothing but the dependencies it declares."""

import email
import importlib.metadata as metadata
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from checkout import ROOT

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import paceline
from importlib.metadata import version

assert paceline.__file__.startswith(sys.prefix), paceline.__file__
assert version("paceline") == paceline.__version__
names = [m.name for m in pkgutil.walk_packages(paceline.__path__, "paceline.")]
names.remove("paceline.__main__")
for name in names:
    importlib.import_module(name)
print("\\n".join(names))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    run([*build, str(ROOT)])
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment's `bin` folder, with the wheel installed and no extras."""
    root = tmp_path_factory.mktemp("empty")
    venv.create(root, with_pip=False, symlinks=True)
    python = root / "bin" / "python"
    (site,) = root.glob("lib/python*/site-packages")
    for name in required_by(wheel):
        link_distribution(name, site)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    # Not --no-deps: pip itself must find every dependency satisfied by what is there.
    run([*pip, "--no-index", "--disable-pip-version-check", str(wheel)])
    return root / "bin"


def required_by(wheel: Path) -> set[str]:
    """Names of all distributions that the wheel needs without extras, and they in turn."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        declared = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(r) for r in declared if is_needed(Requirement(r), frozenset())]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        further = [Requirement(r) for r in metadata.requires(name) or ()]
        waiting += [r for r in further if is_needed(r, extras)]
    return found


def is_needed(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})


def link_distribution(name: str, site: Path) -> None:
    files = metadata.distribution(name).files
    assert files, f"{name} does not list its files"
    base = Path(str(metadata.distribution(name).locate_file("")))
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        link = site / top
        if not top.endswith(".pth") and not link.is_symlink():
            link.symlink_to((base / top).resolve())


def run(command: list[str], **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_holds_the_package_its_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = {p.relative_to(ROOT / "src").as_posix() for p in ROOT.glob("src/**/*.py")}
    assert sources <= set(names)
    pages = {p.relative_to(ROOT / "src").as_posix() for p in ROOT.glob("src/**/templates/*.*")}
    assert any("corpus/lint" in page for page in pages)
    assert pages <= set(names)
    assert "paceline/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"paceline"}


def test_environment_has_no_more_than_the_declared_dependencies(environment):
    probe = "import importlib.util as u; print([n for n in {} if u.find_spec(n)])"
    tools = ["pytest", "hypothesis", "ruff", "jsonschema", "hatchling", "pip"]
    found = run([str(environment / "python"), "-I", "-c", probe.format(tools)])
    assert found.strip() == "[]"


def test_every_module_imports_from_the_wheel(environment, tmp_path):
    python = str(environment / "python")
    names = run([python, "-I", "-c", IMPORT_EVERYTHING], cwd=tmp_path).split()
    assert "paceline.recipe.schema" in names
    sources = {p.parent for p in ROOT.glob("src/paceline/*/__init__.py")}
    assert {f"paceline.{p.name}" for p in sources} <= set(names)


def test_the_command_answers_from_the_wheel(environment, tmp_path):
    said = run([str(environment / "paceline"), "--help"], cwd=tmp_path)
    assert "run" in said
    assert "init" in said
