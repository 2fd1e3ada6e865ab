"""Launches of a kernel on tensors of any size, which are kept and not made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from twinstep.parity.prove.affine import NotAffine
from twinstep.parity.prove.situations import Situation
from twinstep.parity.registry.engines import as_on, engine_for
from twinstep.replay.launch import run as launching
from twinstep.replay.launch.virtual import virtual_tensor
from twinstep.replay.triton import launcher


@dataclass
class Variant:
    """One compiled kernel, and the launches of it that were seen.

    Attributes:
        position: among the launches of a call.
        requests: by size.
        tensors: the arguments of each, by size.
    """

    position: int
    requests: dict[int, launching.Request] = field(default_factory=dict)
    tensors: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)


def launch(situation: Situation, size: int, variants: dict[tuple[int, str], Variant]) -> None:
    """Call a kernel on tensors of a size, and keep its launches instead of making them."""
    case = situation.case()
    count = situation.sizes[0]
    lists = {
        name: [virtual_tensor(size, t.dtype) if t.numel() == count and t.dim() else t for t in row]
        for name, row in case.lists.items()
    }
    named = [(f"{name}[{i}]", t) for name, row in lists.items() for i, t in enumerate(row)]
    named += list(case.controls.items())
    seen: list[launching.Request] = []
    with _kept(seen):
        function = as_on(engine_for(situation.kernel), situation.kernel.function)
        try:
            function(**lists, **case.controls, **case.options)
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            raise NotAffine(f"with {size} elements the call raises: {line}") from None
    for position, request in enumerate(seen):
        variant = variants.setdefault((position, request.digest), Variant(position))
        variant.requests[size] = request
        known = {t.data_ptr() for _, t in named}
        rest = [(label, t) for label, t in request.tensors if t.data_ptr() not in known]
        variant.tensors[size] = [*named, *rest]


@contextmanager
def _kept(seen: list[launching.Request]) -> Iterator[None]:
    """Put launches into a list."""
    usual = vars(launcher)["run"]
    setattr(launcher, "run", seen.append)  # noqa: B010
    try:
        yield
    finally:
        setattr(launcher, "run", usual)  # noqa: B010
