"""The few items of a stream that come first by some key, whatever their order."""

from bisect import insort
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Lowest(Generic[Item]):
    """Keeps the `most` items of the lowest keys; of equal keys the first is kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[Any, Item]] = []

    def wants(self, key: Any) -> bool:
        """Whether an item of this key would be kept."""
        return len(self._kept) < self._most or key < self._kept[-1][0]

    def add(self, key: Any, item: Item) -> None:
        """Offer an item."""
        if not self.wants(key):
            return
        insort(self._kept, (key, item), key=lambda kept: kept[0])
        del self._kept[self._most :]

    def items(self) -> list[Item]:
        """Those kept, lowest key first."""
        return [item for _, item in self._kept]
