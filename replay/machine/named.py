"""Numbers of the host that have names (`names`), as arguments of launches.

Code of users sees a `HostNumber`, which is no float: whatever takes floats alone refuses it. Only
between a launcher and the parameters does a float stand for it.
"""

from __future__ import annotations

from typing import Self


class HostNumber:
    """A float of the host that has a name.

    Attributes:
        value: of this run.
        number: of its expression, in float64.
    """

    value: float
    number: int


class NamedFloat(float):
    """The float that a launcher is given for a `HostNumber`."""

    number: int

    @classmethod
    def of(cls, x: HostNumber) -> Self:
        """The float of this run, and the name."""
        found = cls(x.value)
        found.number = x.number
        return found


class NamedBytes(bytes):
    """A parameter that a number with a name was rounded to.

    Attributes:
        kind: `f16`, `f32`, `f64`, rounded once from float64; `bf16`, the upper half of `f32`.
        number: of the expression in float64.
    """

    kind: str
    number: int

    @classmethod
    def of(cls, data: bytes, kind: str, value: object) -> bytes:
        """These bytes, named as the value that they were made of is."""
        if not isinstance(value, NamedFloat):
            return data
        found = cls(data)
        found.kind, found.number = kind, value.number
        return found
