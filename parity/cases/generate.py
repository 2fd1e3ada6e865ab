"""From a recipe to a case: vectorised, and the same case for the same recipe on any machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from twinstep.parity.cases.brink import on_the_brink
from twinstep.parity.cases.case import Case, Recipe, is_counter, packed_length
from twinstep.parity.cases.covering import completed_steps, size_class
from twinstep.parity.cases.formats import (
    FORMATS,
    Format,
    binade_bits,
    integers,
    to_tensor,
)
from twinstep.parity.cases.planting import plant, planted
from twinstep.parity.cases.regimes import (
    FINITE,
    Codes,
    Values,
    codes_of,
    overlay_bits,
    round_to_bits,
    values,
)
from twinstep.parity.operations.operation import Control, ListArgument, Operation, Role

LONG_TAIL = 2_500  # elements
LONG = 4_096
FP32_EXPONENTS = 255
# Regimes that show nothing in a norm alone, whose gradients are on the brink of another norm there.
BRINK = ("ties", "cancelling", "tiny_root")


def generate(operation: Operation, combination: str, recipe: Recipe, *, pure: bool = False) -> Case:
    """Make the case that a recipe describes.

    Args:
        operation: whose arguments they are.
        combination: of dtypes.
        recipe: where everything else comes from.
        pure: no tensor is a mixture where the regime is another.
    """
    if operation.lists_of(Role.CODE):
        # An integer without dimensions is a count of steps.
        recipe = replace(recipe, dims=max(1, recipe.dims))
    if recipe.period:
        return _repeated(operation, combination, recipe)
    rng = np.random.default_rng(recipe.seed)
    controls = _controls(operation, recipe)
    codes = _codes(operation, recipe, rng, pure)
    intended = values(codes, rng, {name: float(value) for name, value in controls.items()})
    lists: dict[str, list[Tensor]] = {}
    for argument in operation.lists:
        lists[argument.name] = _list(operation, combination, recipe, argument, rng, codes, intended)
    case = Case(
        operation=operation,
        combination=combination,
        lists=lists,
        controls=controls,
        options=dict(recipe.options),
        skews=_skews(recipe, rng, lists),
        guard=recipe.guard,
        recipe=recipe,
        seen=_seen(recipe, codes),
    )
    return planted(case, rng) if recipe.regime == "planted" else case


def _codes(operation: Operation, recipe: Recipe, rng: np.random.Generator, pure: bool) -> Codes:
    """The regime of each element.

    Every second tensor of a list, and the second half of a single one, is a mixture in any regime,
    so that each case shows many regimes. Not in a norm, where the loudest would drown the others.
    """
    codes = codes_of(recipe.regime, rng, sum(recipe.sizes))
    mixture = codes_of("mixture", rng, len(codes))
    if pure or "norm" in operation.writes or recipe.regime == "mixture":
        return codes
    start = 0
    for index, size in enumerate(recipe.sizes):
        alone = len(recipe.sizes) == 1
        first = start + (size // 2 if alone else 0 if index % 2 else size)
        codes[first : start + size] = mixture[first : start + size]
        start += size
    return codes


def _controls(operation: Operation, recipe: Recipe) -> dict[str, Tensor]:
    def value(control: Control) -> Tensor:
        drawn = recipe.controls.get(control.name, control.values[0])
        whole = int(drawn) if control.dtype == torch.int64 else drawn
        return torch.tensor(whole, dtype=control.dtype)

    return {control.name: value(control) for control in operation.controls}


def _list(
    operation: Operation,
    combination: str,
    recipe: Recipe,
    argument: ListArgument,
    rng: np.random.Generator,
    codes: Codes,
    intended: Values,
) -> list[Tensor]:
    """The tensors of one argument."""
    if argument.role is Role.STEPS:
        return _steps(recipe)
    dtypes = operation.combinations[combination].get(argument.name, ())
    absent = argument.optional and recipe.absent and argument.role is not Role.OUTPUT
    if not dtypes or absent:
        return []
    if argument.single:
        return [_flat(operation, recipe, dtypes[0], rng)]
    if argument.shape is not None:
        return _companions(operation, recipe, argument, dtypes, rng)
    tensors, start = [], 0
    reals = intended.of(argument.role)
    # In a norm one huge gradient drowns all others: a mixture keeps its gradients moderate.
    normed = "norm" in operation.writes and argument.role is Role.GRAD
    tame = normed and recipe.regime == "mixture"
    for index, size in enumerate(recipe.sizes):
        dtype = dtypes[index % len(dtypes)]
        part = slice(start, start + size)
        start += size
        if not dtype.is_floating_point:
            tensors.append(_shaped(integers(rng, size, dtype), recipe, index))
            continue
        form = FORMATS[dtype]
        rounded = round_to_bits(reals[part], form.name)
        codes_here = _tamed(codes[part]) if tame else codes[part]
        bits = overlay_bits(rounded, codes_here, rng, argument.role, form.name)
        if normed and (exponent := _alike(recipe, form)):
            bits = binade_bits(bits, form, exponent)
        if argument.role is Role.PARAM and _starts_at_zero(operation, recipe, index):
            bits[:] = 0
        tensors.append(_shaped(to_tensor(bits, form), recipe, index))
    if argument.role is Role.GRAD and recipe.seed % 4 == 1:
        tensors = [idle_in_part(tensor, rng) for tensor in tensors]
    regimes = ("ordinary",) if operation.lists_of(Role.PARAM) else BRINK
    if recipe.brink and normed and recipe.regime in regimes:
        tensors = on_the_brink(tensors, rng)
    elif recipe.brink and argument.role is Role.PARAM and operation.takes_norms and recipe.seed % 3:
        tensors[:1] = on_the_brink(tensors[:1], rng)
    tensors = [_hollow(operation, tensor, recipe, at) for at, tensor in enumerate(tensors)]
    return _with_a_twin(tensors, recipe, len(dtypes))


def _alike(recipe: Recipe, form: Format) -> int:
    """The exponent field of all gradients of a norm, where no element decides; 0 if they differ.

    In the range of fp32: the squares are finite and their sum is not, or the norm itself may leave
    fp32, or the squares do.
    """
    if form.infinity >> form.mantissa != FP32_EXPONENTS:
        return 0
    rng = np.random.default_rng(recipe.seed)
    if recipe.regime == "extreme":
        half = 64 - round(math.log2(max(sum(recipe.sizes), 4)) / 2)
        return int(rng.integers(127 + half, 127 + 64))
    if recipe.regime == "bits" and recipe.seed % 2:
        return int(rng.integers(*((50, 68), (127 + 110, FP32_EXPONENTS))[rng.integers(2)]))
    return 0


def idle_in_part(grad: Tensor, rng: np.random.Generator) -> Tensor:
    """A gradient with rows of zeros: those of an embedding whose tokens are not in the batch.

    Rows are those of a matrix, or runs of some length; half of them are used, or very few, or one
    of a long tensor.
    """
    long = grad.dim() > 1 and grad.shape[-1] > 1
    width = grad.shape[-1] if long else int(rng.choice((1, 16, 64)))
    rows = grad.numel() // width
    if rows < 2:
        return grad
    used = rng.random(rows) < float(rng.choice((0.5, 0.02 if grad.numel() < LONG else 0.0)))
    flat = grad.reshape(-1).clone()
    used[int(flat[: rows * width].abs().argmax()) // width] = True
    flat[: rows * width].view(rows, width)[torch.from_numpy(~used)] = 0
    return flat.reshape(grad.shape)


def one_used(case: Case) -> Case:
    """The case with gradients of zeros but for the largest element of each."""
    lists = dict(case.lists)
    for name in case.operation.lists_of(Role.GRAD):
        lists[name] = [_largest_alone(tensor) for tensor in lists[name]]
    return case.with_lists(lists)


def _largest_alone(grad: Tensor) -> Tensor:
    flat, alone = grad.reshape(-1), torch.zeros_like(grad.reshape(-1))
    if len(flat):
        at = int(flat.abs().argmax())
        alone[at] = flat[at]
    return alone.reshape(grad.shape)


def _with_a_twin(tensors: list[Tensor], recipe: Recipe, kinds: int) -> list[Tensor]:
    """The tensors; where all have one size, the last has the values of the one before it."""
    if len(tensors) > kinds and len(set(recipe.sizes)) == 1:
        tensors[-1] = tensors[-1 - kinds].clone()
    return tensors


def _companions(
    operation: Operation,
    recipe: Recipe,
    argument: ListArgument,
    dtypes: Sequence[torch.dtype],
    rng: np.random.Generator,
) -> list[Tensor]:
    """The tensors of a list whose shapes follow from the leading list."""
    empty = [_shaped(torch.empty(size), recipe, at) for at, size in enumerate(recipe.sizes)]
    lead = [tuple(_hollow(operation, one, recipe, at).shape) for at, one in enumerate(empty)]
    found = []
    for at, shape in operation.companions(argument.name, lead):
        dtype, count = dtypes[at % len(dtypes)], math.prod(shape)
        if dtype.is_floating_point:
            form, codes = FORMATS[dtype], codes_of(recipe.regime, rng, count)
            named = {name: float(value) for name, value in _controls(operation, recipe).items()}
            reals = values(codes, rng, named).of(argument.role)
            bits = overlay_bits(
                round_to_bits(reals, form.name), codes, rng, argument.role, form.name
            )
            found.append(to_tensor(bits, form).reshape(shape))
        else:
            found.append(integers(rng, count, dtype).reshape(shape))
    return found


def _starts_at_zero(operation: Operation, recipe: Recipe, index: int) -> bool:
    """Whether all weights of a tensor are 0, as biases are at first, in one case of three.

    Only where a whole tensor decides: elsewhere single zeros show as much.
    """
    return operation.takes_norms and index == 0 and recipe.seed % 3 == 0


def _tamed(codes: Codes) -> Codes:
    loud = (codes == FINITE.index("extreme")) | (codes == FINITE.index("bits"))
    return np.where(loud, FINITE.index("ordinary"), codes)


def _seen(recipe: Recipe, codes: Codes) -> frozenset[tuple[str, str]]:
    """Pairs of regime and size class among the elements."""
    found, start = set(), 0
    planted_too = ("planted",) if recipe.regime == "planted" else ()
    for size in recipe.sizes:
        here = np.unique(codes[start : start + size])
        names = (*(FINITE[int(code)] for code in here), *planted_too)
        found |= {(name, size_class(size)) for name in names}
        start += size
    return frozenset(found)


def _steps(recipe: Recipe) -> list[Tensor]:
    turns = [recipe.step + (0 if recipe.one_step else at) for at in range(len(recipe.sizes))]
    if recipe.seed % 3 == 0 and len(turns) > 2 and not recipe.one_step:
        # One tensor among many alike, as after a layer is unfrozen.
        turns = [recipe.step] * len(turns)
        turns[recipe.seed // 3 % len(turns)] += 1
    beta2 = recipe.controls.get("beta2", 0.999)
    return [torch.tensor(completed_steps(turn, recipe.seed, beta2)) for turn in turns]


def _flat(
    operation: Operation, recipe: Recipe, dtype: torch.dtype, rng: np.random.Generator
) -> Tensor:
    """A flat buffer long enough for the sizes in slots, with a tail, which is now and then long."""
    slot = int(recipe.options.get("slot", 1))
    tail = int(rng.integers(0, 2 * slot + 1)) + LONG_TAIL * (recipe.seed % 4 == 0)
    length = packed_length(recipe.sizes, slot) + tail
    form = FORMATS[dtype]
    reals = values(codes_of("mixture", rng, length), rng, {}).param
    return to_tensor(round_to_bits(reals, form.name), form)


def _shaped(tensor: Tensor, recipe: Recipe, index: int) -> Tensor:
    """The tensor in the recipe's dimensions: small divisors, or 1, and one long.

    The long one is first or last, in turn from seed to seed and from tensor to tensor, but for
    those of one size: of these two are alike.
    """
    if recipe.dims == 0 or not tensor.numel():
        return tensor.reshape(()) if tensor.numel() == 1 else tensor
    shape, rest = list[int](), tensor.numel()
    for _ in range(recipe.dims - 1):
        width = next((w for w in (7, 5, 4, 3, 2) if rest % w == 0), 1)
        shape.append(width)
        rest //= width
    wide = (recipe.seed + (index if len(set(recipe.sizes)) > 1 else 0)) % 2
    return tensor.reshape(*shape, rest) if wide else tensor.reshape(rest, *shape)


def _hollow(operation: Operation, tensor: Tensor, recipe: Recipe, index: int) -> Tensor:
    """The tensor; without elements in the recipe's dimensions: the last is 0, or the first.

    Not where its state would have elements: their means over none are NaN.
    """
    if tensor.numel() or recipe.dims < 2:
        return tensor
    others = (3,) * (recipe.dims - 1)
    for shape in ((0, *others), (*others, 0))[:: 1 if index % 2 else -1]:
        own = [argument.shape(shape) for argument in operation.shaped if argument.shape]
        if all(one is None or 0 in one for one in own):
            return tensor.reshape(shape)
    return tensor


def _repeated(operation: Operation, combination: str, recipe: Recipe) -> Case:
    """Large tensors cheaply: each holds the values of a small one over and over.

    Where an operation takes norms, the second half of the weights is smaller. A value that is not
    finite is planted once, in the first half of the largest tensor watched.
    """
    sizes = tuple(min(size, recipe.period) for size in recipe.sizes)
    finite = "mixture" if recipe.regime == "planted" else recipe.regime
    short = replace(recipe, sizes=sizes, period=0, dims=1, regime=finite)
    # The norm of a large mixture is infinite, and every result of such a tensor NaN.
    small = generate(operation, combination, short, pure=operation.takes_norms)

    def grown(tensor: Tensor, index: int) -> Tensor:
        if is_counter(tensor):
            return tensor
        size = recipe.sizes[index]
        times = -(-size // max(1, tensor.numel()))
        return _shaped(tensor.repeat(times)[:size], recipe, index)

    lists = {}
    for argument in operation.lists:
        tensors = small.lists[argument.name]
        rng = np.random.default_rng(recipe.seed)
        if argument.single:
            lists[argument.name] = [_flat(operation, recipe, tensors[0].dtype, rng)]
        elif argument.shape is not None:
            dtypes = operation.combinations[combination][argument.name]
            lists[argument.name] = _companions(operation, recipe, argument, dtypes, rng)
        else:
            lists[argument.name] = [grown(tensor, at) for at, tensor in enumerate(tensors)]
        if argument.role is Role.PARAM and operation.takes_norms:
            # Norms of a part would otherwise have one ratio wherever it ends.
            for tensor in lists[argument.name]:
                tensor.view(-1)[tensor.numel() // 2 :].mul_(0.25)
    case = replace(small.with_lists(lists), recipe=recipe)
    if recipe.regime != "planted" or not operation.watched:
        return case
    name, size = operation.watched[0], max(recipe.sizes)
    return plant(case, name, recipe.sizes.index(size), recipe.seed % (size // 2), "+inf")


def _skews(
    recipe: Recipe, rng: np.random.Generator, lists: Mapping[str, Sequence[Tensor]]
) -> dict[str, list[int]]:
    """How far tensors lie off their alignment: not at all, all alike, or those of one list.

    Any other mixture shows a kernel nothing new, but a compiler that looks at alignment makes a
    kernel of its own for each.
    """
    skewed: set[str] = set()
    if not recipe.aligned and lists:
        names = list(lists)
        skewed = set(names) if rng.integers(2) else {names[rng.integers(len(names))]}
    offsets = rng.integers(0, 9, max(map(len, lists.values()), default=0))
    return {
        name: [int(offset) * (name in skewed) for offset in offsets[: len(tensors)]]
        for name, tensors in lists.items()
    }
