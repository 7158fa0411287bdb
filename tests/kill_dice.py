"""What kills an extraction, and when, as the dice of a seed say."""

import random
from collections.abc import Sequence

from kill_marks import Order
from kill_run import WORKERS, Kind

_PLACES = ("journal", "journal", "unit", "", "", "", "")
"""At which the supervisor is killed; where it is empty, all of them."""

_BEGINNINGS = ("recipe", "stage record", "rows", "survey")
_OF_STAGING = ("staging", "lock")
_UPLOADS = ("upload", "upload: put", "upload: head")
_ENDS = ("manifest", "manifest", "stage record")

_POINTS = {"": 100, "journal": 40, "unit": 24, "staging": 12, "manifest": 8, "lock": 6} | (
    dict.fromkeys(_UPLOADS, 12)
)
"""At most the how many-th point of a place it is; 2 for others."""


class Dice:
    """Draws the orders of one start after the other."""

    def __init__(self, seed: str, kind: Kind) -> None:
        self._rng = random.Random(seed)
        self._kind = kind

    def orders(self, left: int, *, is_almost_done: bool) -> tuple[Order, ...]:
        """At most `left` kills of the next start; at times none, and it comes to its end.

        Of one that has few units left, the end is what is worth hitting.
        """
        rng = self._rng
        if left <= 0:
            return ()
        orders: list[Order] = []
        if rng.random() < 0.65:
            orders += [self._of_worker(n) for n in range(rng.randint(1, min(left, 4)))]
        if len(orders) < left and rng.random() < (0.8 if orders else 0.98):
            if is_almost_done and rng.random() < 0.7:
                orders.append(self._at(rng.choice(("supervisor", "group")), _ENDS))
            else:
                orders.append(self._of_supervisor())
        if len(orders) < left and not is_almost_done:
            # For orders whose point does not come: after a few verified units.
            number = rng.randint(8, 24)
            orders.append(Order("late", "supervisor", place="unit: note", number=number))
        return tuple(orders)

    def _of_worker(self, number: int) -> Order:
        rng, name = self._rng, f"worker-{number}"
        worker = rng.randrange(WORKERS)
        if rng.random() < 0.15:
            return Order(name, "starting worker", delay=rng.uniform(0.0, 0.12))
        place = rng.choice(("unit", "unit: sync", "unit: rename", "make", "setup", "", "", ""))
        most = {"setup": 1, "make": 6, "unit: rename": 6, "unit: sync": 12}.get(place, 25)
        return Order(name, "worker", worker, place, rng.randint(1, most), self._delay())

    def _of_supervisor(self) -> Order:
        rng = self._rng
        who = rng.choices(
            ("supervisor", "uploader", "group", "outside", "outside group"), (5, 4, 2, 1, 1)
        )[0]
        if who.startswith("outside"):
            return Order("end", who, delay=0.002 * 400 ** rng.random())
        if who == "uploader" and self._kind != "local":
            return self._at(who, _UPLOADS)
        who = "supervisor" if who == "uploader" else who
        if self._kind != "local" and rng.random() < 0.1:
            return self._at(who, _OF_STAGING)
        return self._at(who, _BEGINNINGS if rng.random() < 0.25 else _PLACES)

    def _at(self, who: str, places: Sequence[str]) -> Order:
        place = self._rng.choice(places)
        number = self._rng.randint(1, _POINTS.get(place, 2))
        # What is over in a moment is hit at once, or not at all.
        delay = 0.0 if places is _ENDS and self._rng.random() < 0.7 else self._delay()
        return Order("end", who, place=place, number=number, delay=delay)

    def _delay(self) -> float:
        """Seconds behind a point: none, or ten microseconds to thirty milliseconds."""
        rng = self._rng
        return 0.0 if rng.random() < 0.4 else 1e-5 * 3000 ** rng.random()
