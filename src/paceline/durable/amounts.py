"""Bytes, spans of time and numbers of shards in messages."""


def size_text(size: float) -> str:
    """Such as `812 B`, `3.9 GB`: powers of 1000, as disks are sold."""
    for unit, power in (("TB", 4), ("GB", 3), ("MB", 2), ("kB", 1)):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f} {unit}"
    return f"{size:.0f} B"


def span_text(seconds: float) -> str:
    """Such as `4 s`, `41 min`, `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def shards_text(count: int) -> str:
    """`1 shard`, `1,234 shards`."""
    return f"{count:,} shard{'' if count == 1 else 's'}"
