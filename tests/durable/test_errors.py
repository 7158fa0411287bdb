"""What the disk refuses is a sentence that names the file, wherever it happens."""

import errno
import os

import pytest

from paceline.durable.errors import StorageRefused, storage_refused
from paceline.durable.fs import RealFileSystem, write_atomic
from paceline.durable.journal import Journal


class Refusing(RealFileSystem):
    """Refuses to write as a descriptor does: without a file's name."""

    def __init__(self, code: int) -> None:
        self.code = code

    def write(self, file, data):
        file.write(memoryview(data)[:3])
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.ENOTCONN],
)
def test_a_refused_write_names_its_file_and_says_what_to_do(tmp_path, code):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        write_atomic(path, b"new content", fs=Refusing(code))
    refused = storage_refused(caught.value)
    assert isinstance(refused, StorageRefused)
    assert str(refused).startswith(f"{path}: {os.strerror(code)}. ")
    assert "the same command goes on" in str(refused)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_record_names_the_journal(tmp_path):
    with Journal(tmp_path / "journal", fs=Refusing(errno.ENOSPC)) as journal:
        with pytest.raises(OSError, match="No space left") as caught:
            journal.append({"kind": "x"})
        assert str(tmp_path / "journal") in str(storage_refused(caught.value))
        assert journal.records == ()
    assert (tmp_path / "journal").read_bytes() == b""


def test_a_missing_file_is_no_disk_to_blame(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "absent").read_bytes()
    assert storage_refused(caught.value) is None
