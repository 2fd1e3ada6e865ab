"""A case: one set of arguments of one operation, as values; and the recipe it was made from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from twinstep.parity.operations.operation import Operation, OptionValue, Role, Shape

NO_TENSORS: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Place in memory of the elements of matrices that are not stored row after row without gaps.

    Attributes:
        names: of the lists whose matrices are stored so.
        columns: stored column after column, else row after row.
        gap: elements between two columns or rows that belong to none.
    """

    names: frozenset[str] = frozenset()
    columns: bool = False
    gap: int = 0

    def strides(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Strides of a tensor of this list; () for contiguous."""
        if name not in self.names or tensor.dim() != 2:
            return ()
        rows, width = tensor.shape
        return (1, rows + self.gap) if self.columns else (width + self.gap, 1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Source of a case: small, so that it is cheap to draw.

    Attributes:
        layout: `flat` or `list`.
        sizes: elements of each tensor.
        regime: a name from `parity.cases.regimes`.
        seed: of the values.
        controls: value of each control.
        options: value of each option.
        aligned: tensors start at multiples of 64 bytes; otherwise anywhere.
        dims: dimensions of the tensors; 0 makes a scalar of each tensor of one element.
        requires_grad: weights require gradients, and the call is made as steps are: without
            recording any.
        absent: leave out optional lists that no dtype combination asks for by name.
        guard: byte that fills the room around the tensors.
        one_step: every tensor has completed the same number of steps.
        step: which of `covering.STEPS` the first tensor has completed; the next one has the next.
        period: elements after which the values of the tensors repeat; 0 for never.
        brink: sums of squares may be on the brink between two norms. Such values spread over more
            bits than training's, so that kernels may read them again: not for what is timed.
    """

    layout: str
    sizes: tuple[int, ...]
    regime: str = "mixture"
    seed: int = 0
    controls: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    aligned: bool = True
    dims: int = 1
    requires_grad: bool = False
    absent: bool = False
    guard: int = 0x5A
    one_step: bool = False
    step: int = 0
    period: int = 0
    brink: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments as values, on the CPU, never handed to a kernel directly.

    Attributes:
        operation: whose arguments these are.
        combination: name of the dtype combination.
        lists: tensors by argument.
        controls: 0-dim tensors by argument.
        options: plain values by argument.
        skews: elements that each tensor is moved off its alignment, by argument.
        guard: byte that fills the room around the tensors.
        recipe: where it came from; kept through shrinking for the report.
        seen: pairs of regime and size class among its elements.
        placement: positions of every list in the order in which their tensors lie in memory; empty
            for the order of the list.
        storage: of matrices that are not contiguous.
        adjacent: no room between the tensors of a list, as in a flat buffer; those of the second
            list lie in the opposite order.
        lies_as: a case with as many and longer tensors, whose addresses these have; None for own.
    """

    operation: Operation
    combination: str
    lists: Mapping[str, Sequence[Tensor]]
    controls: Mapping[str, Tensor]
    options: Mapping[str, OptionValue]
    skews: Mapping[str, Sequence[int]]
    guard: int
    recipe: Recipe
    seen: frozenset[tuple[str, str]] = frozenset()
    placement: tuple[int, ...] = ()
    storage: Storage = Storage()
    adjacent: bool = False
    lies_as: Case | None = None

    @property
    def numel(self) -> int:
        """Elements of the longest list."""
        return max((sum(t.numel() for t in ts) for ts in self.alike.values()), default=0)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Lists whose tensors require gradients."""
        return self.operation.lists_of(Role.PARAM) if self.recipe.requires_grad else ()

    @property
    def length(self) -> int:
        """Tensors in the longest list."""
        return max((len(tensors) for tensors in self.alike.values()), default=0)

    @property
    def alike(self) -> Mapping[str, Sequence[Tensor]]:
        """The lists without those that have shapes of their own."""
        own = {argument.name for argument in self.operation.shaped}
        return {name: tensors for name, tensors in self.lists.items() if name not in own}

    def reference(self) -> dict[str, list[Tensor]]:
        """Results of the reference, by argument; a control as a list of one."""
        return evaluate(self, self.lists)

    def with_lists(self, lists: Mapping[str, Sequence[Tensor]]) -> Case:
        """The same case with other tensors, all aligned as before where they still exist.

        Lists with shapes of their own are fitted to the leading list.
        """
        lists = {**lists, **_fitted(self.operation, lists)}
        lists |= self._with_room(lists)
        skews = {name: _fit(self.skews.get(name, ()), len(lists[name])) for name in lists}
        case = replace(self, lists=lists, skews=skews)
        return case if len(self.placement) == case.length else replace(case, placement=())

    def _with_room(self, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
        """Flat buffers, refilled where they are too short for the tensors of the other lists."""
        single = [argument.name for argument in self.operation.lists if argument.single]
        sizes = [t.numel() for name in lists if name not in single for t in lists[name]]
        length = packed_length(sizes, int(self.options.get("slot", 1)))
        short = [name for name in single if lists[name][0].numel() < length]
        return {name: _refilled(lists[name], [(length,)]) for name in short}

    def taken(self, positions: Sequence[int]) -> Case:
        """The case with the tensors at these positions, in this order, and their companions."""
        single = {argument.name for argument in self.operation.lists if argument.single}
        shapes = [tuple(t.shape) for t in next(iter(self.lists.values()), ())]
        lists: dict[str, Sequence[Tensor]] = {}
        for name, tensors in self.lists.items():
            here = list(range(len(tensors)))
            if name not in self.alike:
                here = [at for at, _ in self.operation.companions(name, shapes)]
            known = dict(zip(here, tensors, strict=False)) if len(tensors) else {}
            kept = [known[at] for at in positions if at in known]
            lists[name] = tensors if name in single else kept
        return self.with_lists(lists)

    def with_controls(self, **values: float) -> Case:
        """The same case with some controls set to other values."""
        new = {
            name: torch.tensor(value, dtype=self.controls[name].dtype)
            for name, value in values.items()
        }
        return replace(self, controls={**self.controls, **new})


def evaluate(case: Case, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Run the reference on these lists with the case's controls and options."""
    ordered = [list(lists[argument.name]) for argument in case.operation.lists]
    results = case.operation.reference(*ordered, **case.controls, **case.options)
    named: dict[str, list[Tensor]] = {}
    for name, result in zip(case.operation.writes, results, strict=True):
        named[name] = [result] if isinstance(result, Tensor) else list(_tensors(result))
    return named


def packed_length(sizes: Sequence[int], slot: int) -> int:
    """Elements of a flat buffer that holds tensors of these sizes, in slots."""
    end = 0
    for size in sizes:
        end = -(-end // slot) * slot + size
    return end


def is_counter(tensor: Tensor) -> bool:
    """True for a count of completed steps: one for each tensor, whatever its elements."""
    return tensor.dim() == 0 and not tensor.is_floating_point()


def _tensors(result: object) -> list[Tensor]:
    if not isinstance(result, list | tuple):
        raise TypeError(f"the reference returned {type(result).__name__}, not a list of tensors")
    return list(result)


def _fitted(operation: Operation, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Lists with shapes of their own: unchanged where those are right, else refilled."""
    lead = [tuple(t.shape) for t in next(iter(lists.values()), ())]
    return {
        argument.name: _refilled(
            lists[argument.name], [own for _, own in operation.companions(argument.name, lead)]
        )
        for argument in operation.shaped
        if len(lists[argument.name]) or not argument.optional
    }


def _refilled(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """Tensors of these shapes with the elements of others, over and over."""
    if not tensors or [tuple(t.shape) for t in tensors] == list(shapes):
        return list(tensors)
    flat = [t.reshape(-1) for t in tensors]
    new = []
    for at, shape in enumerate(shapes):
        row, count = flat[at % len(flat)], math.prod(shape)
        whole = row.repeat(-(-count // max(row.numel(), 1)))[:count]
        new.append((whole if row.numel() else row.new_zeros(count)).reshape(shape))
    return new


def _fit(skews: Sequence[int], length: int) -> list[int]:
    return [*skews, *[0] * length][:length]
