"""An object store: may we write, read, list and delete there, and what do killed uploads leave."""

import json
import shlex
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar
from urllib.parse import urlsplit

from paceline.doctor.findings import Finder, Finding
from paceline.doctor.world import World
from paceline.durable.errors import PacelineError, StoreFailed
from paceline.durable.limit import Call
from paceline.durable.open_store import open_store
from paceline.durable.s3_admin import has_abort_rule, multipart_uploads
from paceline.durable.store import Store
from paceline.recipe.extract_inputs import is_object_store
from paceline.recipe.schema import ExtractRecipe

_FIND = Finder("store")
_DAYS = 7
"""After which an unfinished upload is nobody's any more."""

_T = TypeVar("_T")

_NEEDS = {
    "write": ("no shard could be kept", "PutObject"),
    "read": ("shards could neither be verified nor trained on", "GetObject"),
    "list": ("a run that goes on could not find what is there", "ListBucket"),
    "delete": ("`paceline clean` could remove nothing, and the probe stays there", "DeleteObject"),
}
"""What each permission is for, and its name at S3."""


def check(world: World) -> Iterator[Finding]:
    """Write, read, list and delete one small object; then ask for rules and leftovers.

    Takes several times `world.seconds` at most: each request has that time.
    """
    extract = world.recipe.extract
    if not is_object_store(extract.store):
        yield _FIND.ok("no object store: shards are kept in a folder")
        return
    try:
        store = open_store(extract.store, extract.store_options)
    except PacelineError as error:
        yield _FIND.error(str(error), "no shard could be kept", "correct extract.store")
        return
    reached = yield from _probe(store, extract, world.seconds)
    if reached:
        yield from _leftovers(store, extract, world.seconds)


def _probe(store: Store, extract: ExtractRecipe, seconds: float) -> Generator[Finding, None, bool]:
    """Whether the bucket answered at all is what it returns."""
    key = f"paceline-doctor-{uuid.uuid4().hex}"
    content = f"A probe of `paceline doctor`, {time.time():.0f}. It may be deleted.\n".encode()

    def read() -> None:
        if store.get_range(key, 0, len(content)) != content:
            raise PacelineError(f"{store.url}/{key}: other bytes than were written.")

    def find() -> None:
        if key not in [found.key for found in store.list(key)]:
            raise PacelineError(f"{store.url}: the list lacks {key}, which was just written.")

    steps: list[tuple[str, Callable[[], object]]] = [
        ("write", lambda: store.put(key, content)),
        ("read", read),
        ("list", find),
        ("delete", lambda: store.delete([key])),
    ]
    good: list[str] = []
    may_be_there = False
    reached = True
    for name, step in steps:
        try:
            _within(step, seconds)
        except TimeoutError:
            yield _silent(store, name, seconds)
            may_be_there = True
            reached = False
            break
        except (PacelineError, OSError, KeyError) as error:
            yield _refused(store, name, error)
            if name == "write":
                failed = error if isinstance(error, StoreFailed) else None
                reached = failed is None or failed.kind == "denied"
                # Nothing is there to read, list or delete, unless the answer alone was lost.
                may_be_there = (
                    failed is not None and failed.transient and failed.kind != "unreached"
                )
                break
        else:
            good.append(name)
    if may_be_there:
        yield from _removed(store, extract, key, seconds)
    if len(good) == len(steps):
        yield _FIND.ok(f"{store.url}: a probe object was written, read, listed and deleted")
    return reached


def _removed(store: Store, extract: ExtractRecipe, key: str, seconds: float) -> Iterator[Finding]:
    """Try to remove a probe whose fate is not known; say where it may lie if that fails."""
    try:
        _within(lambda: store.delete([key]), seconds)
    except (TimeoutError, PacelineError, OSError):
        at = f"{urlsplit(store.url).path.strip('/')}/{key}".lstrip("/")
        yield _FIND.note(
            f"{store.url}/{key} may have been left there",
            "a few bytes; nothing reads it",
            _aws(extract, "delete-object", "--key", at)
            if urlsplit(store.url).scheme == "s3"
            else "once the store answers, remove that object with its own tool",
        )


def _silent(store: Store, name: str, seconds: float) -> Finding:
    return _FIND.error(
        f"{store.url} does not answer to {name} within {seconds:g} s",
        "every upload would wait for it",
        "check extract.store, the endpoint of extract.store_options and the network",
    )


def _refused(store: Store, name: str, error: Exception) -> Finding:
    why, action = _NEEDS[name]
    make = _FIND.warning if name == "delete" else _FIND.error
    if not isinstance(error, StoreFailed):
        return make(
            f"{name} failed: {error}", why, "use another store: this one does not give back what "
            "it was given",
        )  # fmt: skip
    said = str(error).removesuffix(error.advice).rstrip()
    if error.kind != "denied":
        return make(
            f"{name} failed: {said}", why, error.advice.rstrip(".") or "look at the store's own log"
        )
    bucket = urlsplit(store.url)
    where = bucket.netloc if name == "list" else f"{bucket.netloc}{bucket.path.rstrip('/')}/*"
    mend = (
        f"allow s3:{action} on arn:aws:s3:::{where}, or give other credentials (AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY)"
        if bucket.scheme == "s3"
        else f"allow this user to {name} objects there"
    )
    return make(f"{name} is refused: {said}", why, mend)


def _leftovers(store: Store, extract: ExtractRecipe, seconds: float) -> Iterator[Finding]:
    """What killed uploads leave in a bucket."""
    try:
        rule = _within(lambda: has_abort_rule(store), seconds)
        uploads = _within(lambda: multipart_uploads(store), seconds)
    except (TimeoutError, PacelineError) as error:
        yield _FIND.note(f"unfinished uploads were not looked at: {error}")
        return
    if rule is False:
        yield _FIND.warning(
            f"{store.url}: the bucket has no rule that aborts unfinished multipart uploads",
            "the parts that a killed upload had sent stay there, hidden and billed",
            _rule_command(extract),
        )
    elif rule is None:
        yield _FIND.note(
            f"{store.url} does not tell whether it removes unfinished multipart uploads by itself"
        )
    else:
        yield _FIND.ok(f"{store.url}: unfinished multipart uploads are aborted by a rule")
    if uploads:
        oldest = min(uploads, key=lambda upload: upload.initiated)
        yield _FIND.warning(
            f"{store.url}: {len(uploads):,} multipart uploads were begun and not ended, the oldest "
            f"{oldest.key} at {oldest.initiated}",
            "unless a run is uploading at this moment, their parts lie there, hidden and billed",
            _aws(extract, "abort-multipart-upload", "--key", oldest.key,
                 "--upload-id", oldest.upload_id),
        )  # fmt: skip


def _rule_command(extract: ExtractRecipe) -> str:
    rule = {
        "ID": "abort-unfinished",
        "Status": "Enabled",
        "Filter": {"Prefix": urlsplit(extract.store).path.strip("/")},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _DAYS},
    }
    command = _aws(
        extract,
        "put-bucket-lifecycle-configuration",
        "--lifecycle-configuration",
        json.dumps({"Rules": [rule]}),
    )
    return f"{command}  # replaces all rules of the bucket: add those that it has"


def _aws(extract: ExtractRecipe, *words: str) -> str:
    endpoint = extract.store_options.get("endpoint", "")
    command = ["aws", *(["--endpoint-url", endpoint] if endpoint else []), "s3api", words[0]]
    return shlex.join([*command, "--bucket", urlsplit(extract.store).netloc, *words[1:]])


def _within(function: Callable[[], _T], seconds: float) -> _T:
    return Call(function, "store").result(seconds)
