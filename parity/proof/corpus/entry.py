"""Known-wrong kernels and harmless variants, one record each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinstep.parity.proof.corpus.calls import Kernel


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kernel that is judged.

    Attributes:
        name: unique among its kind.
        operation: the operation whose contract it is judged by.
        kernel: a function with the operation's signature.
        says: one sentence, what is wrong, what differs or what is called.
        dtypes: the dtype combinations it is judged on.
    """

    name: str
    operation: str
    kernel: Kernel
    says: str
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Entry(Subject):
    """A kernel that the judge must reject; the fault shows on each of its dtype combinations.

    Attributes:
        bugs: rows of `docs/reference/bugs.md` it replants; empty for a fault of our own invention.
        component: the part of an optimizer it belongs to (Adam, overflow, loss scale, ...).
        law: the law that must be among those broken.
        engines: where it can run; `("cpu",)` for plain torch, `("cuda", "replay")` for Triton.
        arithmetic: what it claims to be; the fault breaks that claim.
        waits_for: empty, or what the judge lacks so far to see the fault.
        claims: optional laws it claims to keep.
        alone: it breaks no other law, which shows that its law is needed.
    """

    bugs: tuple[str, ...]
    component: str
    law: str = "value"
    engines: tuple[str, ...] = ("cpu",)
    arithmetic: str = "bounded"
    waits_for: str = ""
    claims: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant(Subject):
    """A kernel that is written otherwise and is right: the judge must accept it.

    Attributes:
        engines: where it can run.
        arithmetic: `exact` where it keeps every rounding, else `bounded`.
        accept: deviations that it has by name, and why.
        unavailable: empty, or why it cannot run on this machine.
    """

    engines: tuple[str, ...] = ("cpu",)
    arithmetic: str = "bounded"
    accept: Mapping[str, str] = field(default_factory=dict)
    unavailable: str = ""
