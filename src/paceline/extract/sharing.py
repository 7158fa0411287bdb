"""Several machines on one store: they have to run the same code."""

import msgspec

from paceline.durable.errors import IntegrityError, UserError
from paceline.durable.store import Store

KEY = "run.json"
"""The object beside the shards that says which code makes them."""


def join(store: Store, software: dict[str, str], *, accept_code: bool) -> None:
    """Leave word of this machine's code in the store, or compare with what others left.

    Raises UserError where shards there are made by other code, unless that is accepted: this
    machine's is then the one that others are compared with. Raises IntegrityError for an object
    that cannot be read.
    """
    if accept_code or store.head(KEY) is None:
        store.put(KEY, msgspec.json.encode(software, order="sorted"))
    # Two that came at the same moment both wrote: what stands there now holds for both.
    stat = store.head(KEY)
    if stat is None:
        raise IntegrityError(f"{store.url}/{KEY}: gone as soon as it was written. Run this again.")
    try:
        theirs = msgspec.json.decode(store.get_range(KEY, 0, stat.size), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise IntegrityError(
            f"{store.url}/{KEY}: not what was written there ({error}). Run this again with "
            "--accept-code: it is written anew."
        ) from error
    differing = [
        f"{name} {theirs.get(name, 'unknown')} there, {software[name]} here"
        for name in ("paceline", "source", "torch", "transformers")
        if theirs.get(name) != software[name]
    ]
    if differing:
        raise UserError(
            f"{store.url}: other machines make its shards with other code ({'; '.join(differing)}"
            "). Install the same on all of them; or, once all of them have the new one, go on "
            "with --accept-code."
        )
