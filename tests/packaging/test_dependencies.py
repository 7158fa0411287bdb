"""What the code imports, what pyproject.toml declares and what docs/dependencies.md explains."""

import ast
import importlib.metadata as metadata
import re
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements):
    return {canonicalize_name(Requirement(r).name) for r in requirements}


HARD = names(PROJECT["project"]["dependencies"])
EXTRAS = PROJECT["project"]["optional-dependencies"]
DEVELOPMENT = names(r for extra in ("lint", "test") for r in EXTRAS[extra])
OPTIONAL = names(r for extra in EXTRAS if extra not in ("lint", "test") for r in EXTRAS[extra])


def third_party_imports():
    """(top-level module, file) for each import of src that is neither ours nor Python's."""
    for path in sorted(ROOT.glob("src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                if top != "paceline" and top not in sys.stdlib_module_names:
                    yield top, path.relative_to(ROOT)


def test_every_import_is_declared_and_every_declaration_imported():
    providers = metadata.packages_distributions()
    used = set()
    for module, path in third_party_imports():
        # An extra that is not installed here has a package of its own name.
        distributions = {canonicalize_name(d) for d in providers.get(module, [module])}
        declared = distributions & (HARD | OPTIONAL)
        assert declared, f"{path}: imports {module}, which pyproject.toml does not declare"
        used |= declared
    assert used == HARD | OPTIONAL, "declared and never imported"


def test_each_dependency_is_explained_once():
    text = (ROOT / "docs" / "dependencies.md").read_text()
    explained = re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)
    everything = HARD | OPTIONAL | DEVELOPMENT | names(PROJECT["build-system"]["requires"])
    assert sorted(explained) == sorted(everything)


def test_constraints_pin_each_dependency_within_its_bounds():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)) for pin in pins}
    assert len(pinned) == len(pins)
    assert all(pin.operator == "==" for pin in pinned.values())
    wanted = [*PROJECT["project"]["dependencies"], *(r for e in EXTRAS.values() for r in e)]
    for requirement in map(Requirement, wanted):
        version = pinned[canonicalize_name(requirement.name)].version
        assert requirement.specifier.contains(version), requirement
