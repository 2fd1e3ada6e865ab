"""Places of a tensor of more than 2³¹ elements that are looked at, and what they hold after a call.

At its ends and in its middle the tensor holds the small tensor once. Behind 2**24 and at a drawn
place it holds it over and over: an index that is kept in fp32 is wrong in few elements there.
"""

from __future__ import annotations

import random

from torch import Tensor, uint8

REPEATED = ("past 2**24", "drawn")
# Whole rows of up to 4,096 elements behind the number from which fp32 has no odd ones.
ODD, BEFORE, ROWS = 2**24, 64, 4_400


class LargePlaces:
    """The places of a tensor of `numel` elements; `seed` draws one of them.

    Attributes:
        numel: its elements.
        drawn: first element of the drawn place.
    """

    def __init__(self, numel: int, seed: int) -> None:
        self.numel = numel
        self.drawn = random.Random(seed).randrange(ODD + ROWS, numel - 2 * ROWS)  # noqa: S311

    def start(self, which: str, count: int) -> int:
        """First element of a place that holds pieces of `count` elements."""
        return {
            "first": 0,
            "middle": (self.numel - count) // 2,
            "last": self.numel - count,
            "past 2**24": ODD - BEFORE,
            "drawn": self.drawn,
        }[which]

    def parts(self) -> tuple[tuple[float, float], ...]:
        """Parts of a row of blocks, from 0 to 1, that hold the pieces of `REPEATED`.

        In a row that runs backwards they lie as far from the other end, and the launch before it
        may have run forwards.
        """
        starts = (self.start(which, 0) / self.numel for which in REPEATED)
        shares = [(start, start + (ROWS + BEFORE) / self.numel) for start in starts]
        return (*shares, *((1.0 - stop, 1.0 - start) for start, stop in shares))

    def pieces(self, flat: Tensor, which: str, count: int) -> Tensor:
        """Content of a place: a view with a row for each time that the small tensor is there."""
        times = ROWS // count if which in REPEATED else 1
        return flat.narrow(0, self.start(which, count), times * count).view(times, count)

    def apart(self, flat: Tensor, count: int) -> list[Tensor]:
        """Both ends and the middle, which together have `count` elements."""
        third = count // 3
        sizes = {"first": third, "middle": third, "last": count - 2 * third}
        return [flat.narrow(0, self.start(which, n), n) for which, n in sizes.items()]


def odd_one(pieces: Tensor) -> Tensor:
    """A piece that differs from the first; the first itself if all are alike.

    All held the same before the call, so each must agree with the reference.
    """
    bits = pieces.view(uint8)
    return pieces[int((bits != bits[0]).any(1).int().argmax())]


def changed(pieces: Tensor, before: Tensor) -> bool:
    """True if any piece holds other bits than the small tensor."""
    return bool((pieces.view(uint8) != before.reshape(-1).to(pieces.device).view(uint8)).any())
