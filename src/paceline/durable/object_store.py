"""Object stores: S3 and what speaks like it, Google's and Azure's, through obstore.

An object carries its CRC64NVME as the user metadata `crc64`. The server checks the bytes of each
request, and after a put size and `crc64` are asked for: that it answered with 200 proves nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore import exceptions

from paceline.durable.checksum import crc64 as crc64_of
from paceline.durable.errors import IntegrityError, StoreFailed
from paceline.durable.iowatch import IoWatch
from paceline.durable.limit import Call
from paceline.durable.object_errors import is_unknown, store_failed
from paceline.durable.pieces import part_size, pieces, promise, whole, words
from paceline.durable.seen import Seen, attributes, instead_of
from paceline.durable.store import Listed, Source, Stat, check_key, check_range, is_key
from paceline.durable.store_options import open_client, s3_bucket

if TYPE_CHECKING:
    from obstore import PutMode

PART_SIZE = 8 << 20
"""Larger objects are sent in parts of this many bytes, or more where 10,000 parts do not reach.

The end of a part is all that tells a slow link from one that has frozen."""

CREATE_LIMIT = 128 << 20
"""The most bytes that `ObjectStore.create` takes: it is one request, held in memory."""

_BLOCK = 8 << 20
_SWEEP_WAITS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Seconds before each try."""
_CONFLICTS = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError)
"""Something else is there than a put was to find; the last: nothing any more, or no bucket."""

# A part may take as long as a slow link needs; everything else is a few bytes.
_PART_TIMEOUT = timedelta(seconds=300)
_CALL_TIMEOUT = timedelta(seconds=60)


class ObjectStore:
    """Objects in a bucket, below a prefix; see `Store`. Threads share it, a pickle reopens it."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, str] | None = None,
        *,
        concurrency: int = 4,
        part_size: int = PART_SIZE,
        tries: int = 3,
        watch: IoWatch | None = None,
    ) -> None:
        """Open it; the server is not asked for anything yet.

        `url` is `s3://bucket/prefix`, `gs://...` or `az://...`. Credentials come from the
        environment or the machine's role, never from `options`. Per put, `concurrency` parts of
        `part_size` bytes (at least 5 MiB) travel at a time and are held in memory. What the
        server keeps otherwise than it was sent is sent `tries` times. Reading the source and
        asking after an object are calls known to `watch`, inside of the caller's own: so what goes
        up in parts shows signs of life. Raises UserError for a url or an option that the client
        does not understand.
        """
        self._url = url.rstrip("/")
        self._options = dict(options or {})
        self._concurrency = concurrency
        self._part_size = part_size
        self._tries = tries
        self._knows_conditions = True
        self._watch = watch or IoWatch()
        self._client = open_client(self._url, self._options, _PART_TIMEOUT)
        self._caller = open_client(self._url, self._options, _CALL_TIMEOUT)
        path = urlsplit(self._url).path.strip("/")
        self.prefix = f"{path}/" if path else ""
        """Of all keys within the bucket; ends with a slash unless empty."""
        self.bucket = s3_bucket(self._url, self._options)
        """Where signed requests go; None where this is not S3."""

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(
            ObjectStore,
            concurrency=self._concurrency,
            part_size=self._part_size,
            tries=self._tries,
        )
        return again, (self._url, self._options)

    def watched(self, watch: IoWatch) -> "ObjectStore":
        """The same store, the calls of which are known to `watch`; see `__init__`."""
        again, (url, options) = self.__reduce__()
        return again(url, options, watch=watch)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix` and the like."""
        return self._url

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`. Raises StoreFailed where the store refuses or does not answer.

        Where another writer's object appears meanwhile that one is left, and StoreFailed says so;
        the next call would replace it. A server that knows no conditions for what is put may
        replace it all the same.
        """
        check_key(key)
        wanted = promise(source, crc64)
        before = self._see_first(key)
        try:
            self._put(key, source, wanted, before)
        except BaseException:
            # The next put of the key sweeps again, and for longer if it goes through.
            self._sweep(key, wanted, _SWEEP_WAITS[:3])
            raise
        self._sweep(key, wanted, _SWEEP_WAITS)
        return wanted

    def _put(self, key: str, source: Source, wanted: Stat, before: Seen | None) -> None:
        seen, conflict = before, None
        for _ in range(self._tries):
            try:
                self._send(key, source, wanted, before)
            except _CONFLICTS as error:
                conflict = error
            except StoreFailed as failure:
                # The answer to a put that succeeded may be lost; the client then tries again and
                # is told that the upload is gone, or that there is a conflict.
                if failure.transient and self._is_kept(key, wanted):
                    return
                raise
            seen = self._see(key)
            if seen is not None and seen.holds(wanted):
                return
            self._require_free(key, wanted, before, seen)
            before = seen
        if conflict is not None:
            raise store_failed(conflict, self._url, f"putting {key}") from conflict
        raise self._not_kept(key, wanted, seen)

    def create(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """Put an object where there is none: for what several machines may write, once.

        It is one request, held in memory, of at most `CREATE_LIMIT` bytes. An earlier write of
        the same bytes, such as our own whose answer was lost, is success. Raises IntegrityError
        where other bytes stand under the key, ValueError for too many bytes, else as `put`.
        """
        check_key(key)
        wanted = promise(source, crc64)
        if wanted.size > CREATE_LIMIT:
            raise ValueError(f"{key}: {wanted.size} bytes are too many for one request")
        data = self._whole(source, wanted)
        conflict = None
        for _ in range(self._tries):
            try:
                self._send_whole(key, data, wanted, "create")
            except _CONFLICTS as error:
                # Perhaps with our own first try, whose answer was lost, perhaps with one that
                # came to nothing.
                conflict = error
            except StoreFailed as failure:
                if failure.transient and self._is_kept(key, wanted):
                    return wanted
                raise
            seen = self._see(key)
            if seen is not None and seen.holds(wanted):
                return wanted
            if seen is not None:
                raise IntegrityError(
                    f"{self._url}: {key} is there with {seen.words}, and was to be created with "
                    f"{words(wanted.size, wanted.crc64)}. Another writer made it: compare its code "
                    "and recipe."
                )
        if conflict is not None:
            raise store_failed(conflict, self._url, f"creating {key}") from conflict
        raise self._not_kept(key, wanted, None)

    def head(self, key: str) -> Stat | None:
        """See `Store.head`: the size, and the checksum that the object was put with.

        Other tools' objects have none; their bytes are read.
        """
        check_key(key)
        seen = self._see(key)
        if seen is None:
            return None
        if seen.crc64 is not None:
            return Stat(seen.size, seen.crc64)
        checksum = size = 0
        with self._in_words(f"reading {key}"):
            for block in obstore.get(self._client, key).stream(min_chunk_size=_BLOCK):
                checksum = crc64_of(memoryview(block), checksum)
                size += len(block)
        return Stat(size, checksum)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.get_range`. Raises StoreFailed where fewer bytes arrive than there are."""
        check_key(key)
        failure = None
        if 0 <= start < end:
            try:
                with self._in_words(f"reading {key}", passing=(FileNotFoundError,)):
                    data = obstore.get_range(self._client, key, start=start, end=end).to_bytes()
            except FileNotFoundError:
                raise KeyError(key) from None
            except StoreFailed as error:
                failure = error
            else:
                if len(data) == end - start:
                    return data
                failure = StoreFailed(
                    f"{self._url}: reading {key}: {len(data)} bytes arrived for {start} to {end}. "
                    "The same call may succeed later.",
                    transient=True,
                )
        # A server refuses, or shortens, what reaches beyond the end: only the size says which.
        try:
            seen = self._see(key)
        except StoreFailed as error:
            if failure is None:
                raise
            raise failure from error
        if seen is None:
            raise KeyError(key)
        check_range(key, start, end, seen.size)
        if failure is not None:
            raise failure
        return b""

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """See `Store.list`. All names are held, as not every server gives them in order."""
        sizes: dict[str, int] = {}
        folder = prefix.rpartition("/")[0]
        with self._in_words(f"listing {prefix or 'all objects'}"):
            for page in obstore.list(self._caller, folder or None, chunk_size=1000):
                for meta in page:
                    key = meta["path"]
                    if key.startswith(prefix) and key > after and is_key(key):
                        sizes[key] = meta["size"]
        for key in sorted(sizes):
            yield Listed(key, sizes[key])

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        names = list(keys)
        for key in names:
            check_key(key)
        if not names:
            return
        doing = f"deleting {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
        try:
            with self._in_words(doing, passing=(FileNotFoundError,)):
                obstore.delete(self._caller, names)
        except FileNotFoundError:
            # Google's and Azure's stop at the first that is absent.
            for key in names:
                with suppress(FileNotFoundError), self._in_words(doing, (FileNotFoundError,)):
                    obstore.delete(self._caller, key)

    def _send(self, key: str, source: Source, wanted: Stat, before: Seen | None) -> None:
        size = part_size(wanted.size, self._part_size)
        if wanted.size <= size:
            self._replace(key, self._whole(source, wanted), wanted, before)
            return
        parts = pieces(source, wanted, size, self._watch)
        with self._in_words(f"putting {key}"):
            obstore.put(
                self._client,
                key,
                self._unless_taken(key, wanted, before, parts),
                attributes=attributes(wanted),
                chunk_size=size,
                max_concurrency=self._concurrency,
            )

    def _replace(self, key: str, data: bytes, wanted: Stat, before: Seen | None) -> None:
        mode = instead_of(before) if self._knows_conditions else "overwrite"
        try:
            self._send_whole(key, data, wanted, mode)
        except StoreFailed as failure:
            if mode == "overwrite" or not is_unknown(failure.__cause__):
                raise
            self._knows_conditions = False
            self._send_whole(key, data, wanted, "overwrite")

    def _unless_taken(
        self,
        key: str,
        wanted: Stat,
        before: Seen | None,
        parts: Iterator[bytes | memoryview],
    ) -> Iterator[bytes | memoryview]:
        """The parts, unless another writer's object is there by now.

        The upload has begun when the first part is asked for. So of two writers either this one
        sees the other's object, or the other, done with its own, finds this upload and ends it
        (`_sweep`).
        """
        # The client asks for parts from within its own loop, which it does not let us enter.
        seen = Call(lambda: self._see(key), "paceline-look").finish()
        self._require_free(key, wanted, before, seen)
        yield from parts

    def _require_free(self, key: str, wanted: Stat, before: Seen | None, seen: Seen | None) -> None:
        """Raise StoreFailed where another writer has put an object there since `before`.

        What a store has made of our own bytes has their checksum among its words.
        """
        if seen is None or seen == before or seen.crc64 == wanted.crc64:
            return
        raise StoreFailed(
            f"{self._url}: putting {key}: another writer has put {seen.words} there meanwhile. "
            "The same call may succeed later.",
            transient=True,
        )

    def _whole(self, source: Source, wanted: Stat) -> bytes:
        with self._watch.call("read", source if isinstance(source, Path) else ""):
            return whole(source, wanted)

    def _send_whole(self, key: str, data: bytes, wanted: Stat, mode: "PutMode") -> None:
        """Raises one of `_CONFLICTS` where `mode` does not fit what is there."""
        with self._in_words(f"putting {key}", passing=_CONFLICTS):
            obstore.put(
                self._client,
                key,
                data,
                attributes=attributes(wanted),
                use_multipart=False,
                mode=mode,
            )

    def _sweep(self, key: str, wanted: Stat, waits: Iterable[float]) -> None:
        """Abort what uploads of this key have left, as far as the server lets us.

        A failed one may have left its parts, and one that succeeded may be a second try behind a
        lost answer. Another writer's of the same key is moot: the key is there, or it tries again.
        """
        parted = wanted.size > part_size(wanted.size, self._part_size)
        if self.bucket is not None and parted:
            call = partial(self._watch.call, "list uploads", f"{self._url}/{key}")
            self.bucket.sweep(self.prefix + key, waits, call)

    def _see_first(self, key: str) -> Seen | None:
        """As `_see`, before a put; what is refused for good is the put's to tell.

        An answer to HEAD has no words, and that to a put says what is wrong.
        """
        try:
            return self._see(key)
        except StoreFailed as failure:
            if failure.transient:
                raise
            return None

    def _see(self, key: str) -> Seen | None:
        """Size and promised checksum of an object; None where there is none."""
        try:
            with (
                self._watch.call("look at", f"{self._url}/{key}"),
                self._in_words(f"asking for {key}", passing=(FileNotFoundError,)),
            ):
                found = obstore.get(self._caller, key, options={"head": True})
        except FileNotFoundError:
            return None
        return Seen.of(found)

    def _is_kept(self, key: str, wanted: Stat) -> bool:
        try:
            seen = self._see(key)
        except StoreFailed:
            return False  # the failure that made us ask is the one to tell
        return seen is not None and seen.holds(wanted)

    def _not_kept(self, key: str, wanted: Stat, seen: Seen | None) -> IntegrityError:
        there = seen.words if seen else "nothing"
        return IntegrityError(
            f"{self._url}: {key} was put {self._tries} times with "
            f"{words(wanted.size, wanted.crc64)}; the store took it and has {there}. "
            "Suspect the store, or a proxy before it."
        )

    @contextmanager
    def _in_words(self, doing: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Raise what the client raises as StoreFailed, but for `passing`."""
        try:
            yield
        except passing:
            raise
        except (exceptions.BaseError, FileNotFoundError) as error:
            raise store_failed(error, self._url, doing) from error
