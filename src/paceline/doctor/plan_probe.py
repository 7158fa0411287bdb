"""The speed of an upload, measured: objects that are written, proven, and removed again."""

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from paceline.doctor.plan_rates import Rate
from paceline.durable.store import Store

OBJECT_BYTES = 8 << 20


def probe_upload(store: Store, uploads: int) -> Rate:
    """Write `uploads` objects of 8 MiB side by side, as an extraction does, and remove them.

    Raises what the store raises; what had been written by then is removed too, as far as the store
    lets it.
    """
    # Bytes that no part of the way can compress.
    data = os.urandom(OBJECT_BYTES)
    mark = uuid.uuid4().hex
    keys = [f"paceline-plan-{mark}-{number}" for number in range(uploads)]
    started = time.perf_counter()
    try:
        with ThreadPoolExecutor(uploads) as pool:
            list(pool.map(lambda key: store.put(key, data), keys))
        seconds = time.perf_counter() - started
    finally:
        store.delete(keys)
    total = OBJECT_BYTES * uploads
    said = f"measured: {uploads} x {OBJECT_BYTES >> 20} MiB written and proven in {seconds:.2f} s"
    return Rate(value=total / max(seconds, 1e-9), source="measured", said=said)
