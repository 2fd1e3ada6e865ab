"""What a known-wrong kernel and a harmless variant are: data, one record each."""

from __future__ import annotations

from dataclasses import dataclass

from twinstep.parity.proof.corpus.bugs import BUGS
from twinstep.parity.proof.corpus.calls import Kernel


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A kernel that the judge must reject.

    Attributes:
        name: unique in the corpus.
        operation: the operation whose contract it breaks.
        bugs: rows of `parity.proof.corpus.bugs.BUGS` it replants; empty for a fault of our own
        invention.
        component: the part of an optimizer it belongs to (Adam, overflow, loss scale, ...).
        law: the law that must be among those broken.
        kernel: a function with the operation's signature.
        says: one sentence, what is wrong.
        dtypes: the dtype combinations it is judged on; the fault shows in each of them.
        engines: where it can run; `("cpu",)` for plain torch, `("cuda", "replay")` for Triton.
        arithmetic: what it claims to be; the fault breaks that claim.
        waits_for: empty, or what the judge lacks so far to see the fault.
        claims: optional laws it claims to keep.
        alone: it breaks no other law, which shows that its law is needed.
    """

    name: str
    operation: str
    bugs: tuple[str, ...]
    component: str
    law: str
    kernel: Kernel
    says: str
    dtypes: tuple[str, ...]
    engines: tuple[str, ...] = ("cpu",)
    arithmetic: str = "bounded"
    waits_for: str = ""
    claims: tuple[str, ...] = ()
    alone: bool = False

    def cites(self) -> tuple[str, ...]:
        """The threads and commits behind it, `owner/name#number` or `owner/name@commit`."""
        return tuple(place for bug in self.bugs for place in BUGS[bug].places)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel that is written otherwise and is right: the judge must accept it.

    Attributes:
        name: unique among the variants.
        operation: the operation whose contract it keeps.
        kernel: a function with the operation's signature.
        says: one sentence, what differs.
        dtypes: the dtype combinations it is judged on.
        engines: where it can run.
        arithmetic: `exact` where it keeps every rounding, else `bounded`.
        unavailable: empty, or why it cannot run on this machine.
    """

    name: str
    operation: str
    kernel: Kernel
    says: str
    dtypes: tuple[str, ...]
    engines: tuple[str, ...] = ("cpu",)
    arithmetic: str = "bounded"
    unavailable: str = ""
