"""What travels through the trainer's channel."""

from dataclasses import dataclass

from paceline.flow.parcel import FeatureHandle, Parcel, into_parcel
from paceline.types.batch import Features


@dataclass(frozen=True)
class Fed:
    """One sample's features, and its place in the order over all epochs."""

    position: int
    features: Features
    """Views of a mapped file, or of `parcel`."""
    parcel: Parcel | None = None
    handle: FeatureHandle | None = None
    """Of `parcel`."""

    def travelling(self) -> "Fed":
        """Itself in a parcel, which another process can open."""
        if self.parcel is not None:
            return self
        parcel, handle = into_parcel(self.features)
        return Fed(self.position, handle.over(parcel), parcel, handle)

    def let_go(self) -> None:
        """Give its memory back; its features must not be used after that."""
        if self.parcel is not None:
            self.parcel.close()
