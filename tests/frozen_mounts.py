"""A place whose storage has frozen: every call there waits in the kernel and comes back never."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MNT_DETACH = 2


@contextmanager
def frozen(point: Path) -> Iterator[None]:
    """Mount a file system over the folder `point` that answers nothing, as a lost server does.

    It is FUSE without anybody behind it. When the block ends the calls that wait fail, and the
    folder is as it was. Skips the test where this user may not mount one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error.strerror}")
    try:
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if libc.mount(b"frozen", bytes(point), b"fuse", 0, options.encode()):
            pytest.skip(f"cannot mount FUSE here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(bytes(point), _MNT_DETACH)
    finally:
        os.close(device)
