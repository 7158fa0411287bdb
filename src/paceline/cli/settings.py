"""Which setting named a path that the file system refuses."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.errors import StorageRefused, UserError, path_of, storage_refused
from paceline.durable.open_store import is_local, local_path
from paceline.recipe.data_files import data_path
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe

_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST)
"""What making a folder says where none can be: below a file, or in /proc."""


@dataclass(frozen=True)
class Setting:
    """A path that the user gave."""

    name: str
    """The option or the recipe's key."""
    path: Path
    is_written: bool = True
    goes_on: bool = False
    """Whether something is there that the same command would go on with."""


def settings_of(recipe: Recipe, run_dir: RunDir) -> tuple[Setting, ...]:
    """Those of a command that runs stages."""
    store, staging = recipe.extract.store, recipe.extract.staging
    begun = run_dir.recipe.is_file()
    found = [Setting("--run DIR", run_dir.root, goes_on=begun)]
    if store and is_local(store):
        found.append(Setting("extract.store", local_path(store), goes_on=begun))
    if staging != "auto":
        found.append(Setting("extract.staging", Path(staging), goes_on=begun))
    found.append(Setting("target.path", Path(recipe.target.path), is_written=False))
    for number, source in enumerate(recipe.corpus.sources):
        name = f"corpus.sources.{number}.path"
        place = data_path(source.path)
        if place is not None:
            found.append(Setting(name, place, is_written=False))
    return tuple(found)


@contextmanager
def settings_named(settings: Sequence[Setting]) -> Iterator[None]:
    """Say of a refused path which of `settings` it comes from, and what can be done about it.

    Raises UserError where one of these paths itself cannot be read or made, StorageRefused for what
    is refused below it; all else passes as it is.
    """
    try:
        yield
    except StorageRefused as refused:
        # In words already, as workers send it.
        if refused.errno not in _RIGHTS:
            raise
        found = _in_words(
            OSError(refused.errno, os.strerror(refused.errno), refused.path), settings
        )
        if found is None:
            raise
        raise found from refused
    except OSError as error:
        found = _in_words(error, settings)
        if found is None:
            raise
        raise found from error


def _in_words(error: OSError, settings: Sequence[Setting]) -> UserError | StorageRefused | None:
    """None for an error that no setting is to blame for."""
    setting = _of(error, settings)
    if setting is None:
        return None
    at, path = _absolute(path_of(error)), _absolute(setting.path)
    is_itself = path.is_relative_to(at)
    if error.errno in _NO_PLACE:
        if not is_itself:
            return storage_refused(error, setting=setting.name, goes_on=setting.goes_on)
        cannot = "cannot be made" if setting.is_written else "cannot be read"
        return UserError(
            f"{setting.path}: {cannot} ({error.strerror}). Choose another place (`{setting.name}`)."
        )
    if is_itself and error.errno in _RIGHTS:
        return UserError(str(storage_refused(error, setting=setting.name, goes_on=False)))
    return storage_refused(error, setting=setting.name, goes_on=setting.goes_on)


def _of(error: OSError, settings: Sequence[Setting]) -> Setting | None:
    """The setting that the error's path is, or lies in; else that whose parents could not be made.

    Where several are, the nearest or the first.
    """
    if not path_of(error):
        return None
    at = _absolute(path_of(error))
    inside = [s for s in settings if at.is_relative_to(_absolute(s.path))]
    if inside:
        return max(inside, key=lambda s: len(_absolute(s.path).parts))
    above = (s for s in settings if s.is_written and _absolute(s.path).is_relative_to(at))
    # A folder that is there had its parents made.
    return next((s for s in above if not s.path.is_dir()), None)


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  without following links, which may hang
