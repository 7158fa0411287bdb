"""The upload pool: a few threads, which try again until the object is there as it should be."""

import errno
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.amounts import span_text
from paceline.durable.checksum import crc64_file, crc64_hex
from paceline.durable.depot import Judge
from paceline.durable.errors import IntegrityError, StoreFailed
from paceline.durable.iowatch import IoWatch
from paceline.durable.store import Stat, Store
from paceline.durable.thread_times import named_threads_seconds

_CLIENT_THREADS = "tokio"
"""The object store's client is a Rust library whose runtime names its threads so."""

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 30.0
_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
            errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG)  # fmt: skip
"""What a file system says that no waiting mends."""

_LAST_WAIT = 0.5
"""Seconds for threads to see that the pool is closed."""

_SLACK = 25.0
"""Seconds that an upload may go without a sign of life beyond what other calls may: on a slow link
no part ends for long, as all of them share it. What hangs is told within a minute even so."""

_WRONG_ANSWERS = 3
"""Times in a row that a store may keep other bytes than those it was sent."""


@dataclass(frozen=True)
class Uploaded:
    """An object that is in the store, as its size and checksum there say."""

    key: str
    stat: Stat
    was_there: bool = False
    """Whether another process had put it there; `stat` is of its object then."""


@dataclass(frozen=True)
class UploadFailed:
    """An object that is not: an IntegrityError where the file is not what was promised."""

    key: str
    error: BaseException


@dataclass
class _Job:
    key: str
    path: Path
    stat: Stat
    may_be_there: bool
    started: float = 0.0
    wrong_answers: int = 0


class Uploader:
    """Puts files into a store with `concurrency` threads of this process.

    An upload is done once `store.put` has returned and `store.head` gives the promised size and
    checksum. With a `judge` the store is looked into before: what is there and is the very unit
    stands, and the upload is done without being made. Errors that may pass are tried again with
    growing pauses, until an upload has failed for `give_up` seconds. `wake` is called, from a
    thread of the pool, whenever `poll` has news. Each attempt is a call that `watch` knows, as
    `upload`; a store that knows the same watch shows in it that it gets on. `slack` seconds may go
    by between two signs of life beyond what other calls may take.
    """

    def __init__(
        self,
        store: Store,
        *,
        concurrency: int,
        wake: Callable[[], None] = lambda: None,
        judge: Judge | None = None,
        watch: IoWatch | None = None,
        slack: float = _SLACK,
        give_up: float = 3600.0,
        first_pause: float = _FIRST_PAUSE,
        seed: int = 0,
    ) -> None:
        self.concurrency = concurrency
        self._store = store
        self._wake = wake
        self._judge = judge
        self._watch = watch or IoWatch()
        self._slack = slack
        self._give_up = give_up
        self._first_pause = first_pause
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._ended: list[Uploaded | UploadFailed] = []
        self._is_closed = False
        self._is_dropped = False
        self._bytes_waiting = 0
        self._bytes_done = 0
        self._retries = 0
        self._errors: dict[str, str] = {}
        self._thread_seconds = 0.0
        self._client_before = named_threads_seconds(_CLIENT_THREADS)
        # Not concurrent.futures: its threads keep a process from ending while a call hangs.
        self._threads = [
            threading.Thread(target=self._work, name=f"paceline-upload-{n}", daemon=True)
            for n in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: str, path: Path, stat: Stat, *, may_be_there: bool = False) -> None:
        """Upload the file at `path`, which stays. Where it may be there already, look first.

        Raises RuntimeError after `close`.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"{key}: the uploader is closed")
            self._queue.append(_Job(key, path, stat, may_be_there))
            self._bytes_waiting += stat.size
            self._changed.notify()

    def poll(self) -> list[Uploaded | UploadFailed]:
        """What has ended since the last call; does not wait."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    @property
    def in_flight(self) -> int:
        """Uploads that a thread is at."""
        return len(self._running)

    @property
    def backlog_bytes(self) -> int:
        """Bytes of uploads that have not ended."""
        return self._bytes_waiting

    @property
    def bytes_done(self) -> int:
        """Bytes of objects verified in the store."""
        return self._bytes_done

    @property
    def retries(self) -> int:
        """Attempts that failed and were, or will be, made again."""
        return self._retries

    @property
    def last_error(self) -> str | None:
        """Why an upload that is being tried again failed last; None while there is none."""
        with self._changed:
            return next(reversed(self._errors.values()), None)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the pool, and of the store's client threads in this process."""
        client = named_threads_seconds(_CLIENT_THREADS) - self._client_before
        return self._thread_seconds + max(0.0, client)

    def longest(self) -> tuple[str, float] | None:
        """The upload that has been under way for the longest, and its seconds."""
        with self._changed:
            jobs = sorted(self._running.values(), key=lambda job: job.started)
            return (jobs[0].key, time.monotonic() - jobs[0].started) if jobs else None

    def close(self, *, wait: bool = False) -> None:
        """Take no more, and end the threads.

        With `wait` everything submitted ends first. Without, what has not begun is dropped, and
        a call that does not return is left to end with the process.
        """
        with self._changed:
            self._is_closed = True
            if not wait:
                self._queue.clear()
                self._bytes_waiting = sum(job.stat.size for job in self._running.values())
            self._is_dropped = not wait
            self._changed.notify_all()
        deadline = time.monotonic() + _LAST_WAIT
        for thread in self._threads:
            thread.join(None if wait else max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                job.started = time.monotonic()
                self._running[job.key] = job
            ended: Uploaded | UploadFailed
            try:
                ended = self._upload(job)
            except BaseException as error:  # noqa: BLE001 - whatever it is, `poll` has to tell it
                ended = UploadFailed(job.key, error)
            with self._changed:
                self._bytes_waiting -= job.stat.size
                if isinstance(ended, Uploaded) and not ended.was_there:
                    self._bytes_done += job.stat.size
                self._errors.pop(job.key, None)
                del self._running[job.key]
                self._ended.append(ended)
            self._wake()

    def _upload(self, job: _Job) -> Uploaded:
        failing_since: float | None = None
        pause = self._first_pause
        while True:
            before = time.thread_time()
            try:
                with self._watch.call("upload", f"{self._store.url}/{job.key}", slack=self._slack):
                    return self._attempt(job)
            except Exception as error:
                failing_since = failing_since or time.monotonic()
                seconds = time.monotonic() - failing_since
                if not _may_pass(error) or seconds > self._give_up:
                    raise
                self._note(job, error, seconds)
                if self._is_ended_in(pause):
                    raise
            finally:
                with self._changed:
                    self._thread_seconds += time.thread_time() - before
            # A lost answer looks like a failure.
            job.may_be_there = True
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _attempt(self, job: _Job) -> Uploaded:
        found = self._found(job)
        if found is not None:
            return found
        try:
            try:
                self._store.put(job.key, job.path, job.stat.crc64)
                self._verify(job.key, job.stat)
            except IntegrityError as error:
                self._blame(job, error)
        except FileNotFoundError as error:
            if job.path.exists():
                raise
            raise IntegrityError(f"{job.path}: removed while it waited for its upload") from error
        return Uploaded(job.key, job.stat)

    def _found(self, job: _Job) -> Uploaded | None:
        """What is there already: of an earlier try of ours, or of somebody else."""
        if not job.may_be_there and self._judge is None:
            return None
        stat = self._store.head(job.key)
        if stat is not None and job.may_be_there and stat == job.stat:
            return Uploaded(job.key, stat)
        if stat is not None and self._judge is not None and self._judge(job.key, stat.size) == stat:
            return Uploaded(job.key, stat, was_there=True)
        return None

    def _verify(self, key: str, stat: Stat) -> None:
        found = self._store.head(key)
        if found != stat:
            what = f"{found.size} bytes with {crc64_hex(found.crc64)}" if found else "no object"
            raise IntegrityError(
                f"{self._store.url}: {key} was put with {stat.size} bytes and checksum "
                f"{crc64_hex(stat.crc64)}, and the store has {what}"
            )

    def _blame(self, job: _Job, error: IntegrityError) -> None:
        """Whose fault it is that the store has other bytes: the file's, or the store's."""
        found = Stat(job.path.stat().st_size, crc64_file(job.path))
        if found != job.stat:
            raise IntegrityError(
                f"{job.path}: {found.size} bytes with checksum {crc64_hex(found.crc64)}, "
                f"{job.stat.size} with {crc64_hex(job.stat.crc64)} were written. Suspect the disk "
                "or the memory."
            ) from error
        job.wrong_answers += 1
        is_transient = job.wrong_answers < _WRONG_ANSWERS
        raise StoreFailed(str(error), is_transient) from error

    def _is_ended_in(self, pause: float) -> bool:
        """Wait for about `pause` seconds; True at once where the pool is told to drop its work."""
        with self._changed:
            seconds = pause * self._random.uniform(0.5, 1.0)
            return self._changed.wait_for(lambda: self._is_dropped, seconds)

    def _note(self, job: _Job, error: Exception, seconds: float) -> None:
        since = f" (for {span_text(seconds)} now)" if seconds >= 1 else ""
        with self._changed:
            self._retries += 1
            self._errors.pop(job.key, None)
            self._errors[job.key] = f"{error}{since}"


def _may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later; disks fill up and mounts come back."""
    if isinstance(error, StoreFailed):
        return error.transient
    return isinstance(error, OSError) and error.errno not in _LASTING
