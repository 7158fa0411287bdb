import errno
import os
import shutil
from pathlib import Path

import pytest

from paceline.durable.errors import no_room
from paceline.durable.room import Room
from paceline.durable.space import (
    Space,
    SpaceWatch,
    is_tmpfs,
    mount_of,
    read_space,
    who_uses,
)
from small_disks import small_disk


def test_space_is_what_df_says_also_for_a_folder_yet_to_be_made(tmp_path):
    found = read_space(tmp_path / "not" / "yet")
    usage = shutil.disk_usage(tmp_path)
    assert found.total == usage.total
    assert abs(found.free - usage.free) < 1 << 30
    assert 0 <= found.share <= 1
    assert Space(100, 30, 30).share == 0.5, "root's reserve is nobody's room"
    assert Space(0, 0, 0).share == 1.0


def test_a_hundredth_is_spared_and_a_gibibyte_at_most():
    assert Space(8 << 20, 0, 8 << 20).spare == (8 << 20) // 100
    assert Space(10**12, 9 * 10**11, 5 * 10**10).spare == 1 << 30
    assert Space(10**10, 9 * 10**9, 10**9).spare == 10**8
    assert Space(0, 0, 0).spare == 0


def watch(shares, high=0.8, low=0.7) -> SpaceWatch:
    left = iter(shares)

    def read(_: Path) -> Space:
        used = round(next(left) * 1000)
        return Space(1000, used, 1000 - used)

    return SpaceWatch(Path("/data"), high, low, read=read)


def test_marks_have_hysteresis():
    steps = [0.5, 0.8, 0.81, 0.75, 0.71, 0.7, 0.79, 0.8, 0.9]
    found = watch(steps)
    assert [found.check() for _ in steps] == [
        True, True, False, False, False, True, True, True, False,
    ]  # fmt: skip
    assert found.describe() == "/data is 90 % full (100 B free)"


def test_drained_the_high_mark_alone_counts():
    found = watch([0.81, 0.75, 0.75, 0.81, 0.81])
    assert [found.check(is_drained=d) for d in (False, False, True, True, True)] == [
        False, False, True, False, False,
    ]  # fmt: skip


def test_a_high_mark_of_1_never_pauses():
    assert watch([1.0], high=1.0, low=1.0).check()


@pytest.mark.parametrize(("high", "low"), [(0.7, 0.8), (1.1, 0.5), (0.5, 0.0)])
def test_impossible_marks(high, low):
    with pytest.raises(ValueError, match="marks"):
        SpaceWatch(Path("/"), high, low)


def test_no_room_is_a_full_disk_or_quota():
    assert no_room(OSError(errno.ENOSPC, "")) is not None
    assert no_room(OSError(errno.EDQUOT, "")) is not None
    assert no_room(OSError(errno.EIO, "")) is None
    assert no_room(ValueError()) is None


def test_mounts_are_found_by_path_the_last_of_a_point_and_with_odd_names(tmp_path):
    table = tmp_path / "mountinfo"
    deep = tmp_path / "a b"
    odd = str(deep).replace(" ", r"\040")
    table.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/vda rw\n"
        f"2 1 8:2 / {odd} rw - ext4 /dev/vdb rw\n"
        f"3 1 0:9 / {odd} rw shared:2 master:3 - nfs4 host:/x\\040y rw\n"
        f"4 1 0:8 / {odd}c rw - xfs /dev/vdc rw\n"
    )
    found = mount_of(deep / "x" / "y", table=table)
    assert (found.device, found.point, found.kind) == ("host:/x y", deep, "nfs4")
    assert mount_of(tmp_path, table=table).kind == "ext4"
    assert mount_of(tmp_path / "a", table=table).point == Path("/")


def test_a_tmpfs_is_known_and_who_fills_it(tmp_path):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        assert is_tmpfs(disk / "deep")
        assert mount_of(disk).point == disk
        (disk / "big").write_bytes(bytes(1_000_000))
        (disk / "folder" / "below").mkdir(parents=True)
        (disk / "folder" / "below" / "x").write_bytes(bytes(2_000_000))
        os.chown(disk / "big", 12345, 12345)
        (name, size), second = who_uses(disk / "folder", limit=2)
        assert name == f"{disk}/folder of root"
        assert 2_000_000 <= size < 2_100_000
        assert second[0] == f"{disk}/big of user 12345"


def test_counting_ends_in_time(tmp_path):
    assert len(who_uses(tmp_path, limit=3, seconds=0.0)) <= 3


class Disk:
    """A disk of 1000 bytes, and a clock."""

    def __init__(self):
        self.used, self.now = 0, 0.0

    def read(self, _: Path) -> Space:
        return Space(1000, self.used, 1000 - self.used)

    def room(self, high=0.8, low=0.7, **more) -> Room:
        return Room(Path("/data"), high, low, read=self.read, clock=lambda: self.now, **more)


def test_room_counts_what_is_in_work():
    disk = Disk()
    room = disk.room(high=1.0, low=1.0)
    disk.used = 500
    assert room.why_not(500, 0) is None
    why = room.why_not(300, 201)
    assert why is not None
    assert "/data is 50 % full (500 B free): the next shard may take 300 B beside 201 B" in why


def test_room_that_keeps_a_spare_goes_by_the_free_bytes_alone():
    disk = Disk()
    room = Room(Path("/data"), keeps_spare=True, read=disk.read)
    disk.used = 950
    assert room.why_not(40, 0) is None, "95 % full"
    assert room.why_not(20, 20) is None
    assert room.why_not(41, 0) == (
        "/data is 95 % full (50 B free): the next shard may take 41 B, and 10 B stay free"
    )
    assert room.better_mark() is None
    disk.used = 949
    assert room.why_not(41, 0) is None, "as soon as it fits"


def test_room_above_the_high_mark_says_when_it_goes_on():
    disk = Disk()
    room = disk.room()
    disk.used = 810
    why = room.why_not(1, 0)
    assert why == (
        "/data is 81 % full (190 B free): it is above 80 %, and the work goes on at 70 %"
    )
    disk.used = 710
    assert room.why_not(1, 0)
    disk.used = 700
    assert room.why_not(1, 0) is None


def test_after_a_refusal_one_at_a_time_after_growing_pauses():
    disk = Disk()
    room = disk.room()
    room.refused(OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"))
    assert room.why_not(1, 0) == "/data/x: Disk quota exceeded"
    disk.now = 0.5
    assert room.why_not(1, 0) is None
    assert room.why_not(1, 7) == "/data/x: Disk quota exceeded", "another one is finding out"
    room.refused(OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"))
    disk.now = 1.4
    assert room.why_not(1, 0)
    disk.now = 1.5
    assert room.why_not(1, 0) is None
    room.took()
    assert room.why_not(1, 7) is None


def test_a_better_mark_leaves_room_for_several_units():
    disk = Disk()
    room = disk.room()
    assert room.better_mark() is None
    disk.used = 810
    room.why_not(10, 0)
    assert room.better_mark() == 0.82
    room.why_not(100, 0)
    assert room.better_mark() is None, "18 % of it would hold one unit"
