"""Several machines on one store: they have to run the same code."""

import logging
from typing import Protocol, runtime_checkable

import msgspec

from paceline.durable.checksum import crc64
from paceline.durable.errors import IntegrityError, StoreFailed, UserError
from paceline.durable.store import Stat, Store
from paceline.extract.slices import Slice

_LOG = logging.getLogger(__name__)

KEY = "run.json"
"""The object beside the shards that says which code makes them."""

_PARTS = "parts"
"""In it, beside the versions: how many machines share the work, 1 where one does all."""

_TRIES = 3

_COMPARED = ("paceline", "source", "torch", "transformers")


@runtime_checkable
class _Creates(Protocol):
    """A store that can put an object where there is none, whoever else does so."""

    def create(self, key: str, data: bytes) -> Stat: ...


def join(store: Store, software: dict[str, str], part: Slice, *, accept_code: bool) -> None:
    """Leave word of this machine's code in the store, or compare with what is left there.

    Who does all of an extraction is taken for the only one at work: other code than before is an
    update then, of which a warning is given, and the word is this machine's from now on. But where
    this machine does a part, or the word was left by one that did, others may be at work.

    Raises UserError for other code there, unless it is accepted: this machine's is then the one
    that others are compared with. Raises IntegrityError for a word that cannot be read, where
    others may be at work, and where the store keeps another one than it was given.
    """
    word = msgspec.json.encode({**software, _PARTS: str(part.count)}, order="sorted")
    if _create(store, word):
        return
    if accept_code:
        _put(store, word)
        return
    try:
        theirs = _read(store)
    except IntegrityError as error:
        if part.count > 1:
            raise
        _LOG.warning("extract: %s; it is written anew", error)
        _put(store, word)
        return
    differing = [
        f"{name} {theirs.get(name, 'unknown')} there, {software[name]} here"
        for name in _COMPARED
        if theirs.get(name) != software[name]
    ]
    is_shared = part.count > 1 or theirs.get(_PARTS) != "1"
    if differing and is_shared:
        raise UserError(
            f"{store.url}: other machines make its shards with other code ({'; '.join(differing)}"
            "). Install the same on all of them; or, once all of them have the new one, go on "
            "with --accept-code."
        )
    if differing:
        _LOG.warning(
            "extract: %s: its shards were begun with other code (%s); where another machine is at "
            "work there, stop one of them",
            *(store.url, "; ".join(differing)),
        )
    if differing or (part.count > 1 and theirs.get(_PARTS) == "1"):
        _put(store, word)


def _create(store: Store, word: bytes) -> bool:
    """Leave the first word; False where there is another one."""
    if isinstance(store, _Creates):
        try:
            store.create(KEY, word)
        except IntegrityError:
            return False
        except StoreFailed as failure:
            # Not every store knows puts that replace nothing; one that does not let us put at all
            # says so below.
            if failure.transient:
                raise
        else:
            return True
    stat = store.head(KEY)
    if stat is None:
        _put(store, word)
    return stat is None


def _put(store: Store, word: bytes) -> None:
    """That it was put, only a look proves."""
    wanted, found = Stat(len(word), crc64(word)), None
    for _ in range(_TRIES):
        store.put(KEY, word)
        found = store.head(KEY)
        if found == wanted:
            return
    raise IntegrityError(f"{store.url}/{KEY}: the store has {found} instead of {wanted}.")


def _read(store: Store) -> dict[str, str]:
    stat = store.head(KEY)
    if stat is None:
        raise IntegrityError(f"{store.url}/{KEY}: it was there, and is gone. Run this again.")
    try:
        return msgspec.json.decode(store.get_range(KEY, 0, stat.size), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, KeyError, ValueError) as error:
        raise IntegrityError(
            f"{store.url}/{KEY}: not what was written there ({error}). Where all machines have "
            "the same code, go on with --accept-code: it is written anew"
        ) from error
