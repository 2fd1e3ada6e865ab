"""Whether a saved state fits the optimizer inside that is to take it. Nothing is written here.

torch compares the number of groups and of parameters, and no more; what else is wrong would show in
a later step, or never.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.errors import in_words
from twinstep.contract.hyper import check_adam, check_lamb
from twinstep.contract.moments import MOMENTS, StateDict, whole_steps
from twinstep.contract.tensors import check_in_memory
from twinstep.fast.fused_adam import FusedAdam
from twinstep.fast.fused_lamb import FusedLamb

COUNTED = ("step", *MOMENTS)
LARGEST = "max_exp_avg_sq"
MOMENTUM = "momentum_buffer"
Options = Mapping[str, object]


def state_inside(
    optimizer: torch.optim.Optimizer,
    saved: object,
    where: str,
    *,
    key: str = "optimizer_state_dict",
) -> StateDict:
    """Return the saved state of an optimizer, once it is known to fit.

    Flags that its groups lack stay as they are now.

    Args:
        optimizer: the one inside; not changed.
        saved: its dict.
        where: the method, for messages.
        key: under which the dict was found, for messages.

    Raises:
        ValueError: it is none, or groups, their sizes, options, or names, shapes, dtypes and
            counters of state are not those of this optimizer.
    """
    given = require_dict_of_optimizer(saved, where, key)
    rows = cast("list[dict[str, object]]", given["param_groups"])
    members = [cast("list[int]", row["params"]) for row in rows]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if [len(numbers) for numbers in members] != wanted:
        raise ValueError(
            f"state has groups of {[len(numbers) for numbers in members]} parameters, but should "
            f"have {wanted} [{where}]"
        )
    entries = cast(Mapping[object, object], given["state"])
    known = {number for numbers in members for number in numbers}
    if len(known) < sum(wanted) or not known.issuperset(entries):
        raise ValueError(
            f"state is of parameters {sorted(map(str, entries))}, but should be of "
            f"{sorted(known)}, each in one group [{where}]"
        )
    now = optimizer.state_dict()["param_groups"]
    for index, (row, numbers) in enumerate(zip(rows, members, strict=True)):
        merged = {**now[index], **row}
        _check_options(optimizer, row, merged, f"group {index}, {where}")
        masters = optimizer.param_groups[index]["params"]
        for number, master in zip(numbers, masters, strict=True):
            expected = _expected(optimizer, master, bool(merged.get("amsgrad")))
            expected.check(entries.get(number), f"parameter {number}", where)
    return {**given, "param_groups": [{**own, **row} for own, row in zip(now, rows, strict=True)]}


def require_dict_of_optimizer(saved: object, where: str, key: str) -> StateDict:
    """Return the state dict of some optimizer.

    Raises:
        ValueError: it is none.
    """
    rows = saved.get("param_groups") if isinstance(saved, dict) else None
    if isinstance(rows, list) and isinstance(cast(StateDict, saved).get("state"), dict):
        members = [row.get("params") if isinstance(row, dict) else None for row in rows]
        if all(isinstance(m, list) and all(isinstance(n, int) for n in m) for m in members):
            return cast(StateDict, saved)
    raise ValueError(f"{key} should be the state dict of an optimizer, but is not [{where}]")


def _check_options(
    optimizer: torch.optim.Optimizer, row: Options, merged: Options, where: str
) -> None:
    """Require the options of this class, and values that it takes."""
    name, defaults = type(optimizer).__name__, optimizer.defaults
    flags = (bool, type(None))
    for option in defaults:
        if option not in row and not isinstance(defaults[option], flags):
            raise ValueError(f"state has no {option}, but {name} should have it [{where}]")
    if "max_coeff" in row and "max_coeff" not in defaults:
        raise ValueError(f"state has max_coeff, as that of LAMB, but {name} should not [{where}]")
    if isinstance(optimizer, FusedAdam | FusedLamb):
        changed = [option for option in ("amsgrad", "maximize") if row.get(option) is True]
        if changed:
            raise ValueError(f"{changed[0]}=True, but should be False for {name} [{where}]")
        try:
            check_adam(merged, where)
            if isinstance(optimizer, FusedLamb):
                check_lamb(merged, where)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return
    for option, like in defaults.items():
        several = isinstance(like, tuple | list)
        values = merged[option] if several else [merged[option]]
        likes = like if several else [like]
        if not (isinstance(values, tuple | list) and len(values) == len(likes)):
            raise ValueError(
                f"{option}={in_words(values)}, but should be {len(likes)} numbers [{where}]"
            )
        for value, one in zip(values, likes, strict=True):
            if isinstance(one, int | float | Tensor) and not isinstance(one, bool):
                _require_number(option, value, where)


def _require_number(option: str, value: object, where: str) -> None:
    single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not (single or plain) or math.isnan(float(cast(float, value))):
        raise ValueError(f"{option}={in_words(value)}, but should be a number [{where}]")


@dataclass(frozen=True)
class _Expected:
    """State of one parameter.

    Attributes:
        names: of all that there is, or None where they are not known.
        like: tensors whose shape and dtype state of that name has.
        master: whose shape the rest has.
    """

    names: Sequence[str] | None
    like: Mapping[str, Tensor]
    master: Tensor

    def check(self, held: object, which: str, where: str) -> None:
        """Require the state of a parameter to be this; none at all is fine.

        Raises:
            ValueError: it is something else.
        """
        if held is None or held == {}:
            return
        if not isinstance(held, Mapping):
            raise ValueError(
                f"state of {which} is a {type(held).__name__}, but should be a dict [{where}]"
            )
        if self.names is not None and sorted(held) != sorted(self.names):
            raise ValueError(
                f"state of {which} has {', '.join(map(str, held))}, but should have "
                f"{', '.join(self.names)} [{where}]"
            )
        for name, value in held.items():
            if name == "step":
                whole_steps(value, f"{which}, {where}")
            elif name in self.like and not (name == MOMENTUM and value is None):
                self._compare(name, value, self.like[name], which, where)
            elif isinstance(value, Tensor) and value.dim() > 0:
                like = self.master if value.is_floating_point() else None
                self._compare(name, value, like, which, where)

    def _compare(
        self, name: str, value: object, like: Tensor | None, which: str, where: str
    ) -> None:
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f"{name} of {which} is a {kind}, but should be a tensor [{where}]")
        check_in_memory(value, f"{name} of {which}", where)
        shape = tuple((self.master if like is None else like).shape)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name} of {which} has shape {tuple(value.shape)}, but should have {shape} "
                f"[{where}]"
            )
        if like is not None and value.dtype != like.dtype:
            raise ValueError(
                f"{name} of {which} is {value.dtype}, but should be {like.dtype} [{where}]"
            )


def _expected(optimizer: torch.optim.Optimizer, master: Tensor, amsgrad: bool) -> _Expected:
    """What this class keeps of a parameter, as far as that is known."""
    names: Sequence[str] | None = None
    if isinstance(optimizer, FusedAdam | FusedLamb):
        names = COUNTED
    elif isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        names = (*COUNTED, LARGEST) if amsgrad else COUNTED
    elif isinstance(optimizer, torch.optim.SGD):
        names = (MOMENTUM,)
    own = optimizer.state.get(master, {})
    if names is None and own:
        names = tuple(own)
    like = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    like = {name: value for name, value in like.items() if value.dim() > 0}
    return _Expected(names, like | dict.fromkeys((*MOMENTS, LARGEST, MOMENTUM), master), master)
