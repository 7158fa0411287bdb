"""Uploads through a line that breaks, and to a server that is killed: reduced in tests, long in
`make torture`."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count as numbers

from fault_proxy import fault_proxy
from paceline.durable.checksum import crc64
from paceline.durable.errors import StoreFailed
from paceline.durable.object_store import ObjectStore
from paceline.durable.s3_admin import multipart_uploads
from paceline.durable.store import Stat
from seaweed import Seaweed

PART = 5 << 20
"""The least that S3 allows."""

_PATIENCE = 60.0


@dataclass(frozen=True)
class Uploads:
    """What became of them."""

    verified: int
    """Read back from the server, past the proxy, byte for byte."""
    again: int
    """Puts that failed and were made again."""
    resets: int
    unfinished: int
    """Multipart uploads that the server still lists."""


def uploads_with_resets(
    s3: Seaweed,
    count: int,
    *,
    seed: int,
    reset: float = 0.01,
    size: int = 16 << 20,
    threads: int = 8,
) -> Uploads:
    """`count` objects of `size` bytes in parts, with a reset per 64 KiB by probability."""
    prefix = f"resets-{seed}"
    direct = ObjectStore(s3.url(prefix), s3.options)
    with fault_proxy(s3.port, reset=reset, seed=seed) as proxy:
        store = ObjectStore(
            s3.url(prefix), {**s3.options, "endpoint": proxy.endpoint}, part_size=PART
        )

        def upload(number: int) -> tuple[bool, int]:
            data = random.Random(f"{seed} {number}").randbytes(size)
            key = f"unit-{number:06d}"
            tries = put_until_done(lambda: store.put(key, data, crc64(data)))
            whole = direct.get_range(key, 0, size) == data
            direct.delete([key])
            return whole, tries - 1

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(upload, range(count)))
        return Uploads(
            verified=sum(whole for whole, _ in results),
            again=sum(again for _, again in results),
            resets=proxy.resets,
            unfinished=len(multipart_uploads(direct)),
        )


def uploads_while_the_server_is_killed(s3: Seaweed, kills: int, *, seed: int) -> int:
    """Kill the server so often while three threads put; how many puts it had acknowledged.

    Raises AssertionError where one of those is missing or has other bytes.
    """
    store = ObjectStore(s3.url(f"kills-{seed}"), s3.options, part_size=PART)
    acked: dict[str, Stat] = {}
    stop = threading.Event()
    dice = random.Random(seed)

    def upload(thread: int) -> None:
        own = random.Random(f"{seed} {thread}")
        for number in numbers():
            if stop.is_set():
                return
            key = f"thread-{thread}/unit-{number:06d}"
            # The third writes in parts.
            size = own.randrange(1, 200_000) if thread < 2 else PART + 1000
            data = random.Random(key).randbytes(size)
            put_until_done(lambda key=key, data=data: acked.update({key: store.put(key, data)}))

    with ThreadPoolExecutor(3) as pool:
        uploads = [pool.submit(upload, thread) for thread in range(3)]
        try:
            for _ in range(kills):
                seen = len(acked)
                deadline = time.monotonic() + _PATIENCE
                while len(acked) < seen + 5 and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(dice.uniform(0, 0.3))
                s3.kill()
                s3.start()
        finally:
            stop.set()
        for upload_ in uploads:
            upload_.result()
    for key, stat in acked.items():
        assert store.head(key) == stat, f"seed {seed}: {key}"
        data = store.get_range(key, 0, stat.size)
        assert data == random.Random(key).randbytes(stat.size), f"seed {seed}: {key}"
    assert multipart_uploads(store) == [], f"seed {seed}"
    return len(acked)


def put_until_done(put: Callable[[], object]) -> int:
    """Try as long as the store says that it may pass; how many tries it took."""
    deadline = time.monotonic() + _PATIENCE
    for tries in numbers(1):
        try:
            put()
        except StoreFailed as failure:
            if not failure.transient or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return tries
    raise AssertionError
