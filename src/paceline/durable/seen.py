"""What a server says of an object: its size, the checksum it was put with, the server's version."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.durable.checksum import crc64_hex
from paceline.durable.pieces import words
from paceline.durable.store import Stat

if TYPE_CHECKING:
    from obstore import GetResult, PutMode

_ATTRIBUTE = "crc64"


@dataclass(frozen=True)
class Seen:
    """An object, as its server describes it."""

    size: int
    crc64: int | None
    """None where it was put by another tool."""
    e_tag: str
    version: str
    """The server's own names for what it has, empty where it has none."""

    @classmethod
    def of(cls, found: "GetResult") -> "Seen":
        """From the answer to a request."""
        try:
            checksum = int(found.attributes.get(_ATTRIBUTE, ""), 16)
        except ValueError:
            checksum = None
        meta = found.meta
        return cls(meta["size"], checksum, meta["e_tag"] or "", meta["version"] or "")

    def holds(self, wanted: Stat) -> bool:
        """Whether it is the promised object."""
        return (self.size, self.crc64) == (wanted.size, wanted.crc64)

    @property
    def words(self) -> str:
        """Size and checksum, for people."""
        return words(self.size, self.crc64)


def instead_of(before: Seen | None) -> "PutMode":
    """The condition of a put: that what was there before is still there, or still nothing."""
    if before is None:
        return "create"
    if not before.e_tag:
        return "overwrite"
    if before.version:
        return {"e_tag": before.e_tag, "version": before.version}
    return {"e_tag": before.e_tag}


def attributes(wanted: Stat) -> Any:
    """What an object is put with, so that `Seen.of` knows its checksum."""
    return {_ATTRIBUTE: crc64_hex(wanted.crc64)}
