"""Torch on names: the reference, and kernels in plain PyTorch, beside their own run on the CPU.

Every operation runs as always; beside it the names of its result are formed from those of its
operands, with the roundings that the operation has in PyTorch on a CPU. An operation whose
roundings are not defined (sums, fused multiply-adds that depend on the machine) is refused as soon
as a name reaches it. Views share memory and so share names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from twinstep.parity.prove.torch_forms import extremum, fused, root_is_a_function
from twinstep.parity.prove.torch_integers import INTEGERS, integer, resized
from twinstep.parity.prove.torch_rules import BINARY, COMPARE, INTEGER, LOGIC, MOVES, UNARY
from twinstep.parity.runner.calls.places import place_in
from twinstep.replay.dtypes import Array
from twinstep.replay.names.naming import granules_of, names_of, set_names
from twinstep.replay.names.session import NotNamed, Session
from twinstep.replay.names.values import comparison

KIND = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
NARROW = (torch.float16, torch.bfloat16)


class TorchNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs torch on names.

    Args:
        session: whose table and memory are used.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session
        self.flags: dict[int, int] = {}
        self.kept: list[Tensor] = []
        self.before: dict[int, Tensor] = {}
        self.given: int | None = None
        self.assumed: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch imports its compiler, for seconds, to keep it away from a mode that is skipped."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run one operation, and name its results."""
        words = dict(kwargs or {})
        if func.name().startswith("aten::lift_fresh"):
            # Made of the host's own numbers.
            self.kept.append(args[0])
            self.put(args[0], None)
            return func(*args, **words)
        tensors = [x for x in tree_leaves((args, words)) if isinstance(x, Tensor)]
        names = {id(t): self.names(t) for t in tensors if t.device.type == "cpu"}
        named = self.given is not None or any((n >= 0).any() for n in names.values())
        name = func.name().removeprefix("aten::")
        if named and name.startswith("_local_scalar_dense"):
            return self.read(args[0], names[id(args[0])])
        # An operation in place reads what it writes.
        self.before = {id(t): t.clone() for t in _written(func, args, words)} if named else {}
        result = func(*args, **words)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.kept += outputs
        written = [*outputs, *_written(func, args, words)]
        if func.is_view:
            return result
        if not named:
            for tensor in written:
                self.put(tensor, None)
            return result
        if name.startswith(("empty", "new_empty")) or "_like" in name.split(".")[0]:
            for tensor in written:
                self.put(tensor, None)
            return result
        self.put(written[0], self._result(name, func, args, words, names, written))
        return result

    # --- names of tensors ------------------------------------------------------------------

    def names(self, tensor: Tensor, site: str = "") -> Array:
        """The numbers of a tensor's elements, -1 where there is none; of a bool one, predicates."""
        if tensor.dtype == torch.bool:
            found = [self.flags.get(a, -1) for a in _addresses(tensor)]
            return np.array(found, np.int64).reshape(tensor.shape)
        return names_of(self.session, tensor, site)

    def put(self, tensor: Tensor, numbers: Array | None) -> None:
        """Name a tensor's elements."""
        if tensor.dtype == torch.bool:
            flat = np.full(tensor.shape, -1) if numbers is None else numbers
            whole = np.broadcast_to(flat, tensor.shape).reshape(-1).tolist()
            self.flags.update(zip(_addresses(tensor), whole, strict=True))
        else:
            set_names(self.session, tensor, numbers)

    def read(self, tensor: Tensor, numbers: Array) -> object:
        """A host read: of a truth value it is a branch, of anything else it is refused.

        Raises:
            NotNamed: the host reads a number.
        """
        value = tensor.reshape(()).numpy().item()
        if tensor.dtype != torch.bool:
            raise NotNamed(f"the host reads a number that has a name{_here()}", "names", _here())
        self.session.decide(int(numbers.reshape(())), bool(value), f"host read{_here()}")
        return value

    # --- names of results ------------------------------------------------------------------

    def _result(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        words: Mapping[str, Any],
        names: Mapping[int, Array],
        written: Sequence[Tensor],
    ) -> Array:
        """Numbers of the result of an operation that a name reaches.

        Raises:
            NotNamed: the operation is not followed.
        """
        base, _, overload = name.partition(".")
        plain = base if base.endswith("__") else base.removesuffix("_")
        target = written[0]
        if len(written) > 1 and overload != "out" and written[1] is not target:
            raise self.refusal(name)
        if plain in ("_to_copy", "copy", "clone", "contiguous"):
            source = args[1] if plain == "copy" else args[0]
            return self._operand(source, target.dtype, names)
        if plain in MOVES:
            return self._moved(func, args, words, names, target)
        if target.dtype == torch.bool and plain in LOGIC:
            word = LOGIC[plain]
            count = 1 if word == "not" else 2
            return self._flagged(word, args[:count], names, target)
        if plain in UNARY:
            return self.unary(UNARY[plain], args[0], target, names)
        found = fused(
            self,
            plain,
            args,
            words,
            target,
            lambda x: self._operand(x, target.dtype, names, target),
        )
        if found is not None:
            return found
        if target.dtype in INTEGERS and plain in INTEGER and words.get("alpha", 1) == 1:
            pair = [self._operand(x, target.dtype, names, target) for x in args[:2]]
            return integer(self, plain, pair, args[1], target)
        if plain == "isnan":
            number = self._operand(args[0], args[0].dtype, names, target)
            return self.each("not", [self.compare("eq", args[0].dtype, [number] * 2)], 0)
        if plain in BINARY or plain in ("rsub", "pow"):
            return self._binary(plain, name, args, words, target, names)
        if plain in COMPARE:
            common = _common(args[0], args[1])
            if common in NARROW and not all(_has(x, common) for x in args[:2]):
                raise self.refusal(f"{name} of {common} and a number of another type")
            common = _opmath(common)
            pair = [self._operand(x, common, names, target) for x in args[:2]]
            return self.compare(COMPARE[plain], common, pair)
        if plain == "any" and name == "any" and args[0].dtype == torch.bool:
            every = self._operand(args[0], torch.bool, names).reshape(-1).tolist()
            return np.array(self.session.table.row("or", every, 0, _here()))
        if plain in ("maximum", "minimum"):
            pair = [self._operand(x, target.dtype, names) for x in args[:2]]
            return extremum(self, name, func, pair, target)
        if plain == "where":
            flags = self._operand(args[0], torch.bool, names, target)
            pair = [self._operand(x, target.dtype, names, target) for x in args[1:3]]
            g = 0 if target.dtype == torch.bool else target.element_size() // 2
            return self.each("if", [flags, *pair], g)
        if plain == "fill":
            return self._operand(args[1], target.dtype, names, target)
        raise self.refusal(name)

    def refusal(self, name: str) -> NotNamed:
        """The error for an operation that is not followed."""
        return NotNamed(f"torch's {name}{_here()}", name, _here())

    def each(self, op: str, columns: Sequence[Array], granules: int) -> Array:
        """Numbers of one operation, with the caller's line as its site."""
        return self.session.table.each(op, columns, granules, _here)

    def _operand(
        self, x: Any, dtype: torch.dtype, names: Mapping[int, Array], like: Tensor | None = None
    ) -> Array:
        """Numbers of an operand in a type, constants where it has no names."""
        shape = tuple(like.shape) if like is not None else tuple(x.shape)
        tensor = x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype)
        own = names.get(id(x)) if isinstance(x, Tensor) else None
        found = np.full(tensor.shape, -1, np.int64) if own is None else own
        some = found >= 0
        if some.any():
            found = np.where(some, self.converted(found, tensor.dtype, dtype), found)
        if not some.all():
            whole = self.before.get(id(x), tensor).to(dtype)
            if dtype == torch.bool:
                constants = self.session.table.consts(whole.numpy().astype(np.uint8), 0)
            else:
                bits = np.ascontiguousarray(granules_of(whole))
                g = bits.shape[-1]
                constants = self.session.table.consts(bits.view(f"u{2 * g}")[..., 0], g)
            found = np.where(some, found, constants)
        return np.broadcast_to(found, shape)

    def converted(self, numbers: Array, source: torch.dtype, target: torch.dtype) -> Array:
        """Numbers of values in another type; from float64 to 16 bits torch goes by float32."""
        if source == target:
            return numbers
        if source == torch.bool and target in KIND:
            g = torch.empty(0, dtype=target).element_size() // 2
            one, zero = (
                self._operand(torch.tensor(x, dtype=target), target, {}) for x in (1.0, 0.0)
            )
            return self.each("if", [numbers, one, zero], g)
        if source in INTEGERS and target in INTEGERS:
            return resized(self, numbers, source.itemsize, target.itemsize)
        if source not in KIND or target not in KIND:
            raise self.refusal(f"conversion from {source} to {target}")
        if source in NARROW and target != torch.float32:
            half = self.converted(numbers, source, torch.float32)
            return self.converted(half, torch.float32, target)
        if target in NARROW and source != torch.float32:
            half = self.converted(numbers, source, torch.float32)
            return self.converted(half, torch.float32, target)
        rounds = "" if source in NARROW or target == torch.float64 else "rn."
        g = {torch.float32: 2, torch.float64: 4}.get(target, 1)
        return self.each(f"cvt.{rounds}{KIND[target]}.{KIND[source]}", [numbers], g)

    def _moved(
        self,
        func: Any,
        args: Sequence[Any],
        words: Mapping[str, Any],
        names: Mapping[int, Array],
        target: Tensor,
    ) -> Array:
        """Numbers of an operation that only moves elements: it moves their numbers."""

        def _numbered(x: Any) -> Any:
            if not isinstance(x, Tensor) or id(x) not in names or not x.is_floating_point():
                return x
            return torch.from_numpy(np.array(self._operand(x, x.dtype, names)))

        rest = {k: v for k, v in words.items() if k not in ("dtype", "layout", "device")}
        found = func(*tree_map(_numbered, tuple(args)), **tree_map(_numbered, rest))
        return np.asarray(found.numpy())

    def unary(self, word: str, x: Tensor, target: Tensor, names: Mapping[int, Array]) -> Array:
        """Numbers of a function of one operand."""
        dtype = _opmath(target.dtype)
        if word in ("abs", "neg"):
            whole = self._operand(x, target.dtype, names)
            g = target.element_size() // 2
            return self.each(f"{word}.{KIND[target.dtype]}", [whole], g)
        number = self._operand(x, dtype, names)
        if word == "sqrt" and dtype != torch.float64:
            if target.dtype != dtype or not root_is_a_function():
                raise self.refusal("sqrt in float32, which is not the correctly rounded one")
            self.assumed["torch's float32 root is a function of its operand (measured)"] = None
            return self.each("sqrt.torch.f32", [number], 2)
        kind = KIND[dtype]
        g = 4 if dtype == torch.float64 else 2
        if word == "sign":
            one, minus, zero = (
                self._operand(torch.tensor(x, dtype=dtype), dtype, {}, target)
                for x in (1.0, -1.0, 0.0)
            )
            above = self.each(f"lt.{kind}", [zero, number], 0)
            below = self.each(f"lt.{kind}", [number, zero], 0)
            found = self.each("if", [above, one, self.each("if", [below, minus, zero], g)], g)
        elif word == "reciprocal":
            one = self._operand(torch.tensor(1.0, dtype=dtype), dtype, {})
            found = self.each(f"div.rn.{kind}", np.broadcast_arrays(one, number), g)
        else:
            found = self.each(f"{word}.rn.{kind}", [number], g)
        return self.converted(found, dtype, target.dtype)

    def _binary(
        self,
        plain: str,
        name: str,
        args: Sequence[Any],
        words: Mapping[str, Any],
        target: Tensor,
        names: Mapping[int, Array],
    ) -> Array:
        """Numbers of + - x /, rounded once to the type of the result."""
        left, right = args[0], args[1]
        if plain == "pow":
            if right not in (2, 2.0) or isinstance(right, Tensor):
                raise self.refusal(name)
            plain, right = "mul", left
        dtype = _opmath(target.dtype)
        alpha = args[2] if plain == "rsub" and len(args) > 2 else words.get("alpha", 1)
        if target.dtype not in KIND or alpha != 1 or words.get("rounding_mode") is not None:
            raise self.refusal(f"{name}, alpha={alpha}, to {target.dtype}")
        if dtype != target.dtype and any(
            not isinstance(x, Tensor) or x.dtype != target.dtype for x in (left, right)
        ):
            raise self.refusal(f"{name} of {target.dtype} and a number of another type")
        if plain == "rsub":
            plain, left, right = "sub", right, left
        pair = [self._operand(x, dtype, names, target) for x in (left, right)]
        g = 4 if dtype == torch.float64 else 2
        word = BINARY[plain]
        return self.converted(self.each(f"{word}.rn.{KIND[dtype]}", pair, g), dtype, target.dtype)

    def compare(self, word: str, dtype: torch.dtype, pair: Sequence[Array]) -> Array:
        """Numbers of a comparison, in the widest type of its operands."""
        kind = f"s{8 * dtype.itemsize}" if dtype in INTEGERS else KIND.get(dtype)
        if kind is None:
            raise self.refusal(f"comparison of {dtype}")
        return comparison(word, kind, pair, _here())

    def _flagged(
        self, word: str, args: Sequence[Any], names: Mapping[int, Array], target: Tensor
    ) -> Array:
        """Numbers of logic on truth values."""
        return self.each(word, [self._operand(x, torch.bool, names, target) for x in args], 0)


def _opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in NARROW else dtype


def _has(x: Any, dtype: torch.dtype) -> bool:
    """True for a tensor of a type, and for a number that the type holds exactly."""
    if isinstance(x, Tensor):
        return x.dtype == dtype
    return bool(torch.tensor(x, dtype=dtype).double() == x)


def _common(*values: Any) -> torch.dtype:
    found: Callable[..., torch.dtype] = torch.result_type
    return found(*values)


def _addresses(tensor: Tensor) -> list[int]:
    place = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = length
        place += (torch.arange(length) * step).reshape(shape)
    found: list[int] = (place + tensor.data_ptr()).reshape(-1).tolist()
    return found


def _written(func: Any, args: Sequence[Any], words: Mapping[str, Any]) -> list[Tensor]:
    """Arguments that an operation writes."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = words.get(argument.name, args[index] if index < len(args) else None)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _here() -> str:
    """The line outside libraries that calls torch now."""
    import sys

    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    return place_in(frame)
