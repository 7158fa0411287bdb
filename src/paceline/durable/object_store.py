"""Object stores: S3 and what speaks like it, Google's and Azure's, through obstore.

An object carries its CRC64NVME as the user metadata `crc64`. The server checks the bytes of each
request, and after a put size and `crc64` are asked for: that it answered with 200 proves nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore import exceptions

from paceline.durable.checksum import crc64 as crc64_of
from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import IntegrityError, StoreFailed
from paceline.durable.object_errors import store_failed
from paceline.durable.pieces import part_size, pieces, promise, whole, words
from paceline.durable.store import Listed, Source, Stat, check_key, check_range, is_key
from paceline.durable.store_options import open_client, s3_bucket

PART_SIZE = 16 << 20
"""Larger objects are sent in parts of this many bytes, or more where 10,000 parts do not reach."""

CREATE_LIMIT = 128 << 20
"""The most bytes that `ObjectStore.create` takes: it is one request, held in memory."""

_BLOCK = 8 << 20
_ATTRIBUTE = "crc64"
_SWEEPS = 3
_CONFLICTS = (exceptions.AlreadyExistsError, exceptions.PreconditionError)

# A part may take as long as a slow link needs; everything else is a few bytes.
_PART_TIMEOUT = timedelta(seconds=300)
_CALL_TIMEOUT = timedelta(seconds=60)


class _Seen(NamedTuple):
    """What the server says of an object."""

    size: int
    crc64: int | None


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
    ) -> None:
        """Open it; the server is not asked for anything yet.

        `url` is `s3://bucket/prefix`, `gs://...` or `az://...`. Credentials come from the
        environment or the machine's role, never from `options`. Per put, `concurrency` parts of
        `part_size` bytes (at least 5 MiB) travel at a time and are held in memory. What the
        server keeps otherwise than it was sent is sent `tries` times. Raises UserError for a url
        or an option that the client does not understand.
        """
        self._url = url.rstrip("/")
        self._options = dict(options or {})
        self._concurrency = concurrency
        self._part_size = part_size
        self._tries = tries
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

    @property
    def url(self) -> str:
        """`s3://bucket/prefix` and the like."""
        return self._url

    def put(self, key: str, source: Source, crc64: int | None = None) -> Stat:
        """See `Store.put`. Raises StoreFailed where the store refuses or does not answer."""
        check_key(key)
        wanted = promise(source, crc64)
        seen = None
        for _ in range(self._tries):
            try:
                self._send(key, source, wanted)
            except StoreFailed as failure:
                # The answer to a put that succeeded may be lost; the client then tries again and
                # is told that the upload is gone, or that there is a conflict.
                if failure.transient and self._is_kept(key, wanted):
                    return wanted
                raise
            seen = self._see(key)
            if seen == (wanted.size, wanted.crc64):
                return wanted
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
        data = whole(source, wanted)
        conflict = None
        for _ in range(self._tries):
            try:
                self._send_whole(key, data, wanted, mode="create")
            except _CONFLICTS as error:
                # Perhaps with our own first try, whose answer was lost, perhaps with one that
                # came to nothing.
                conflict = error
            except StoreFailed as failure:
                if failure.transient and self._is_kept(key, wanted):
                    return wanted
                raise
            seen = self._see(key)
            if seen == (wanted.size, wanted.crc64):
                return wanted
            if seen is not None:
                raise IntegrityError(
                    f"{self._url}: {key} is there with {words(*seen)}, and was to be created with "
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

    def _send(self, key: str, source: Source, wanted: Stat) -> None:
        size = part_size(wanted.size, self._part_size)
        if wanted.size <= size:
            self._send_whole(key, whole(source, wanted), wanted, mode="overwrite")
            return
        try:
            with self._in_words(f"putting {key}"):
                obstore.put(
                    self._client,
                    key,
                    pieces(source, wanted, size),
                    attributes=_attributes(wanted),
                    chunk_size=size,
                    max_concurrency=self._concurrency,
                )
        finally:
            self._sweep(key)

    def _send_whole(
        self, key: str, data: bytes, wanted: Stat, *, mode: Literal["create", "overwrite"]
    ) -> None:
        with self._in_words(f"putting {key}", passing=_CONFLICTS if mode == "create" else ()):
            obstore.put(
                self._client,
                key,
                data,
                attributes=_attributes(wanted),
                use_multipart=False,
                mode=mode,
            )

    def _sweep(self, key: str) -> None:
        """Abort what uploads of this key have left, as far as the server lets us.

        A failed one may have left its parts, and one that succeeded may be a second try behind a
        lost answer. Another writer's of the same key is moot: the key is there, or it tries again.
        """
        if self.bucket is None:
            return
        for _ in range(_SWEEPS):
            try:
                left = list(self.bucket.unfinished(self.prefix + key))
                self.bucket.abort(upload for upload in left if upload.key == self.prefix + key)
            except TimeoutError:
                return  # the bucket's own rule is for what stays
            except (OSError, HTTPException, ValueError, RuntimeError):
                continue
            return

    def _see(self, key: str) -> _Seen | None:
        """Size and promised checksum of an object; None where there is none."""
        try:
            with self._in_words(f"asking for {key}", passing=(FileNotFoundError,)):
                found = obstore.get(self._caller, key, options={"head": True})
        except FileNotFoundError:
            return None
        try:
            checksum = int(found.attributes.get(_ATTRIBUTE, ""), 16)
        except ValueError:
            checksum = None
        return _Seen(found.meta["size"], checksum)

    def _is_kept(self, key: str, wanted: Stat) -> bool:
        try:
            return self._see(key) == (wanted.size, wanted.crc64)
        except StoreFailed:
            return False  # the failure that made us ask is the one to tell

    def _not_kept(self, key: str, wanted: Stat, seen: _Seen | None) -> IntegrityError:
        there = words(*seen) if seen else "nothing"
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


def _attributes(wanted: Stat) -> Any:
    return {_ATTRIBUTE: crc64_hex(wanted.crc64)}
