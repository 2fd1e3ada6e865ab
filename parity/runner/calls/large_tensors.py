"""A call on a tensor of more than 2³¹ elements, of which only a few pieces are looked at.

The first elements, the last ones, those about the middle, some behind 2**24 and some at a drawn
place. On replay the tensor is virtual: addresses without memory, and only the blocks of these
places run; in a grid of several axes those at the ends and in the middle of each. On a GPU the
memory is real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.laws.large_index import APART, places
from twinstep.parity.records.errors import CannotJudge, CannotRun
from twinstep.parity.registry.engines import Engine
from twinstep.parity.runner.calls.invoke import Ended, invoke
from twinstep.parity.runner.calls.large_places import REPEATED, LargePlaces, changed, odd_one

# Past 2³¹, and on replay past 2³², where unsigned offsets wrap too.
ELEMENTS = {"replay": 2**32 + 2**31 + 77, "cuda": 2**31 + 4_099}
ENDS = 8
# Pages of a region, and regions that the blocks of the places can touch: each place lies in two at
# most, and wrapped offsets lead to a few more.
REGION, FEW_REGIONS = 1 << 14, 24
SECONDS = 4.0


class LargeTensors:
    """One case with its last tensors blown up: the small tensor's values in a few places.

    Args:
        case: of one tensor, or of several of which the last grows.
        engine: where it will run.

    Attributes:
        block: a tensor on the device, for `invoke`.
        folded: a grid had more than one axis, and of `REPEATED` some blocks at most have run.
        places: of the last tensors, that are looked at.
    """

    def __init__(self, case: Case, engine: Engine) -> None:
        self.case = case
        self.numel = ELEMENTS[engine.name]
        self.places = LargePlaces(self.numel, case.recipe.seed)
        self._need_memory(engine)
        self.lists = {name: self._grown(tensors, engine) for name, tensors in case.lists.items()}
        self.controls = {name: t.clone().to(engine.device) for name, t in case.controls.items()}
        self.block = torch.empty(0, device=engine.device)
        self.folded = False

    def _need_memory(self, engine: Engine) -> None:
        if engine.name != "cuda":
            return
        last = [ts[-1] for ts in self.case.lists.values() if len(ts) and not is_counter(ts[-1])]
        needed = sum(self.numel * tensor.element_size() for tensor in last)
        # Blocks that torch keeps for later are free, too.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if needed > free:
            raise CannotJudge(
                f"{self.numel} elements take {needed >> 30} GiB, but the GPU has {free >> 30} free"
            )

    def call(self, kernel: Callable[..., object]) -> object:
        """Call the kernel on the large tensors."""
        ordered = [self.lists[argument.name] for argument in self.case.operation.lists]
        return kernel(*ordered, **self.controls, **self.case.options)

    def named(self) -> dict[str, Tensor]:
        """All tensors of the call, by the names that messages give them."""
        lists = self.lists.items()
        named = {f"{name}[{index}]": t for name, ts in lists for index, t in enumerate(ts)}
        return {**named, **self.controls}

    def require_ends(self, grids: Sequence[tuple[int, ...]]) -> None:
        """Require that the blocks at the ends of a row of blocks have reached those of the tensor.

        Programs that walk on by the length of the row touch far more places than the three that
        are looked at, and it is any of them that comes last.

        Args:
            grids: of the launches.

        Raises:
            CannotJudge: they need not have.
        """
        from twinstep.replay.launch.virtual import touched

        self.folded = any(y * z > 1 for _, y, z in grids)
        if self.folded:
            return
        large = [ts[-1] for ts in self.lists.values() if len(ts) and ts[-1].numel() == self.numel]
        if not large:
            return
        pages = touched(large[0])
        regions = pages[: len(pages) // REGION * REGION].view(-1, REGION).any(1)
        if int(regions.sum()) > FEW_REGIONS:
            raise CannotJudge(
                f"programs walk over {self.numel} elements by the length of the grid, and those at "
                "its ends, which alone run, need not come to the end of the tensor"
            )

    def end(self, memory: GuardedMemory, which: str) -> Tensor:
        """The bytes of guarded memory, had it held what these elements hold now.

        Args:
            memory: of the case.
            which: see `Call.end`.
        """
        after, reached = memory.before.clone(), False
        for span in memory.spans:
            if not span.value.numel():
                continue
            held = self.controls if span.control else None
            tensor = held[span.name] if held else self.lists[span.name][span.index]
            flat, count = tensor.reshape(-1), span.value.numel()
            if flat.numel() == self.numel:
                if which == APART:
                    flat = torch.cat(self.places.apart(flat, count))
                else:
                    pieces = self.places.pieces(flat, which, count)
                    flat = odd_one(pieces)
                    reached |= changed(pieces, span.value)
            span.of(after).copy_(flat.view(span.value.shape))
        if which in REPEATED and (self.folded or not reached):
            # Blocks in an order of their own: those that run were not all those of this place.
            return self.end(memory, "first")
        return after

    def _grown(self, tensors: Sequence[Tensor], engine: Engine) -> list[Tensor]:
        """Copies of the tensors; the last one is large, with its old elements in each place."""
        zeros, device = (_on_gpu, "cuda") if engine.name == "cuda" else (_virtual, "cpu")
        copies = [tensor.to(device, copy=True) for tensor in tensors]
        if not copies or is_counter(copies[-1]) or not copies[-1].numel():
            return copies
        small = copies[-1].reshape(-1)
        large = zeros(self.numel, small.dtype)
        for which in places(self.case):
            if which == APART:
                parts = self.places.apart(large, small.numel())
                own = torch.split(small, [part.numel() for part in parts])
                for part, held in zip(parts, own, strict=True):
                    part.copy_(held)
            else:
                self.places.pieces(large, which, small.numel()).copy_(small)
        return [*copies[:-1], large]


def _virtual(numel: int, dtype: torch.dtype) -> Tensor:
    from twinstep.replay import virtual_tensor

    return virtual_tensor(numel, dtype)


def _on_gpu(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device="cuda")


# Makers of tensors without values, or of zeros, by whether the first argument is a tensor.
MAKERS = {"empty": False, "zeros": False, "new_empty": True, "new_zeros": True}
LIKE = ("empty_like", "zeros_like")


class _PiecesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch take views of large tensors and make further ones, and touch all of none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler inside the first call, seconds of its limit."""
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = str(func).split(".")[1]
        made = _made(name, args, kwargs or {})
        if made is not None:
            return made
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.numel() >= 2**31:
                    raise CannotJudge(
                        f"the kernel calls {func} on all of {value.numel()} elements, which exist "
                        "on replay only where they are touched"
                    )
        value = func(*args, **(kwargs or {}))
        # Blocks that do not run leave what they would have made of zeros.
        return value.zero_() if name in LIKE or name in MAKERS else value


def _made(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """A new tensor, virtual if it is large; None for other operators and smaller tensors."""
    if name in LIKE:
        shape, like = tuple(args[0].shape), args[0]
    elif name in MAKERS:
        shape, like = tuple(args[MAKERS[name]]), args[0] if MAKERS[name] else None
    else:
        return None
    if math.prod(shape) < 2**31:
        return None
    from twinstep.replay import virtual_tensor

    usual = torch.get_default_dtype() if like is None else like.dtype
    return virtual_tensor(shape, kwargs.get("dtype") or usual)


def call_large(function: Callable[..., object], large: LargeTensors, engine: Engine) -> Ended:
    """Call the kernel.

    Raises:
        CannotJudge: on replay a program, or torch, walks over the whole tensor, or programs by the
            length of the grid, or blocks count themselves; on a GPU the kernel needs more memory
            than there is beside it.
    """
    if engine.name != "replay":
        return invoke(function, large, 60.0)
    from twinstep.replay import launches

    try:
        with launches() as log, _PiecesOnly():  # type: ignore[no-untyped-call]
            ended = invoke(function, large, SECONDS)
    except CannotRun as error:
        # What is too large for this machine is fine in the other laws.
        raise CannotJudge(f"{error}") from None
    if ended.fatal == "hang":
        raise CannotJudge(
            f"a program walks over all of {large.numel} elements, which takes replay too long"
        )
    if not ended.failure:
        for launch in log:
            if launch.miscounted_at:
                raise CannotJudge(
                    f"an atomic of {launch.kernel} tells each block what to do, and on replay "
                    "few blocks run of those that it should count"
                )
        large.require_ends([launch.grid for launch in log])
    return ended
