"""Every optimizer class of either side behind one interface, as the battery of tests takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.sides import CLASSES, COUNTING, PLAIN, SIDES, WRAPPERS
from twinstep.contract.compat import Compat
from twinstep.parity.cases.fixed_inputs import bits, moderate

HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.87, 0.987), "weight_decay": 0.03}
DTYPES = {"FP16Optimizer": torch.float16, "FP16UnfusedOptimizer": torch.float16}
DTYPES |= {"BF16Optimizer": torch.bfloat16}
MIXED = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Subject:
    """One optimizer class of one side.

    Attributes:
        side: of SIDES.
        name: of the class, which both sides have.
    """

    side: str
    name: str

    def __str__(self) -> str:
        return f"{self.side}-{self.name}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that it is made for; fp32 where any will do."""
        return DTYPES.get(self.name, torch.float32)

    def __call__(self, params: Any, *, inside: Any = "FusedAdam", **options: Any) -> Any:
        """An optimizer over parameters or groups.

        Args:
            params: parameters, or groups of them.
            inside: class of the inner optimizer of a wrapper, by name.
            options: `hyper` is for the inner optimizer, and `compat` a dict.
        """
        home = CLASSES[self.side]
        hyper = {**options.pop("hyper", {})}
        for given in (hyper, options):
            if "compat" in given:
                given["compat"] = Compat(**given["compat"])
        if self.name in PLAIN:
            return home[self.name](params, **hyper, **options)
        inner = home.get(inside) or getattr(torch.optim, inside)
        made = inner(params, **hyper)
        if self.name != "BF16Optimizer":
            return home[self.name](made, **{"verbose": False, **options})
        everything = [param for group in made.param_groups for param in group["params"]]
        names = {param: f"p{place}" for place, param in enumerate(everything)}
        return home[self.name](made, **{"param_names": names, **options})

    def parameters(self, *shapes: int | tuple[int, ...]) -> list[Parameter]:
        """Parameters of its dtype."""
        return parameters(shapes, self.dtype)


def each(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrise `subject` over classes on both sides."""
    found = [Subject(side, name) for name in names for side in SIDES]
    return pytest.mark.parametrize("subject", found, ids=str)


EVERY, PLAINS, WRAPPED = each((*PLAIN, *WRAPPERS)), each(PLAIN), each(WRAPPERS)
COUNTED = each(COUNTING)


def parameters(
    shapes: Sequence[int | tuple[int, ...]], dtype: torch.dtype | None, seed: int = 0
) -> list[Parameter]:
    """Moderate values; None takes fp16, bf16 and fp32 in turn."""
    made = []
    for slot, given in enumerate(shapes):
        shape = (given,) if isinstance(given, int) else given
        values = moderate(math.prod(shape), seed + slot, dtype or MIXED[slot % 3])
        made.append(Parameter(values.reshape(shape)))
    return made


def fill(
    params: Sequence[Tensor], seed: int, *, missing: Sequence[int] = (), bad: float | None = None
) -> None:
    """Numbered gradients; `bad` replaces the last element of the last one."""
    for slot, param in enumerate(params):
        grad = moderate(param.numel(), 100 * seed + slot, param.dtype)
        if bad is not None and slot == len(params) - 1:
            grad[-1] = bad
        param.grad = None if slot in missing else grad.reshape(param.shape)


def advance(optimizer: Any) -> None:
    """One step with the gradients of the parameters."""
    if hasattr(optimizer, "update_hp_grads"):
        optimizer.update_hp_grads()
    optimizer.step()


def steps_of(optimizer: Any, param: Tensor) -> int:
    """Steps that count for a parameter: its own, or those of its group."""
    held = optimizer.state[param]
    if "step" in held:
        return int(held["step"])
    groups = [g for g in optimizer.param_groups if any(one is param for one in g["params"])]
    return int(groups[0]["step"])


def masters_of(optimizer: Any) -> list[Tensor]:
    """Master weights; the parameters themselves where nothing is wrapped."""
    return [master for group in optimizer.param_groups for master in group["params"]]


def observed(optimizer: Any, params: Sequence[Tensor]) -> dict[str, object]:
    """Everything that both sides show of an optimizer, by kind; waits for the device."""
    masters = masters_of(optimizer)
    state = [optimizer.state.get(master, {}) for master in masters]
    found: dict[str, object] = {
        "state": [_plain(dict(held)) for held in state],
        "weights": _plain(params),
        "gradients": _plain([param.grad for param in params]),
        "masters": _plain(masters),
        "groups": [
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
    }
    for name in ("overflow", "clip_grad", "bf16_groups_flat", "adam_w_mode"):
        found[name] = _plain(getattr(optimizer, name, None))
    if hasattr(optimizer, "loss_scaler"):
        found["scale"] = (optimizer.loss_scale, optimizer.loss_scaler.state_dict())
    if hasattr(optimizer, "get_global_norm"):
        found["norm"] = optimizer.get_global_norm().hex()
    lamb = getattr(optimizer, "optimizer", optimizer)
    if hasattr(lamb, "get_lamb_coeffs"):
        found["ratios"] = lamb.get_lamb_coeffs()
    if hasattr(optimizer, "bf16_groups"):
        for name in ("accumulator", "has_gradient", "padding"):
            found[name] = [_plain(getattr(group, name)) for group in optimizer.groups]
    return found


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), bits(value.detach())
    if isinstance(value, dict):
        return {name: _plain(inside) for name, inside in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


SHAPES: list[list[tuple[int, ...]]] = [[(3, 70), (0,), (5,)], [(), (300,)]]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.03, "weight_decay": 0.1},
    {"lr": 0.004, "betas": (0.8, 0.95), "eps": 1e-5, "bias_correction": False},
]


class Twins:
    """The same model under the classes of both sides, a row of shapes for each group.

    Attributes:
        fast, reference: the optimizers.
        params: of the fast side, and of the reference.
    """

    def __init__(
        self,
        name: str,
        shapes: Sequence[Sequence[tuple[int, ...]]] = SHAPES,
        dtype: torch.dtype | str | None = None,
        *,
        transposed: bool = False,
        scaler: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.params: list[list[Parameter]] = []
        made = []
        for side in SIDES:
            subject = Subject(side, name)
            chosen = None if isinstance(dtype, str) else dtype or subject.dtype
            rows = [parameters(row, chosen, 7 * at) for at, row in enumerate(shapes)]
            if transposed:
                rows[0][0] = Parameter(rows[0][0].detach().t())
            groups = [{"params": row} | OPTIONS[at % 2] for at, row in enumerate(rows)]
            if scaler is not None:
                options["loss_scale_config"] = CLASSES[side]["DynamicLossScale"](**scaler)
            made.append(subject(groups, **options))
            self.params.append([param for row in rows for param in row])
        self.fast, self.reference = made

    def both(self) -> Iterator[tuple[Any, list[Parameter]]]:
        """Each side with its parameters."""
        return zip((self.fast, self.reference), self.params, strict=True)

    def do(self, act: Callable[[Any], object]) -> None:
        """Do the same to both."""
        for optimizer, _ in self.both():
            act(optimizer)

    def fill(self, seed: int, missing: Sequence[int] = (), bad: float | None = None) -> None:
        """Give both the same gradients."""
        for _, params in self.both():
            fill(params, seed, missing=missing, bad=bad)

    def backward(self, seed: int, missing: Sequence[int] = (), bad: float | None = None) -> None:
        """One micro-batch, whose gradients are the same numbers on both sides."""
        for optimizer, params in self.both():
            loss = torch.zeros(())
            for slot, param in enumerate(params):
                if slot not in missing:
                    weight = moderate(param.numel(), 50 * seed + slot, param.dtype)
                    if bad is not None and param.numel():
                        weight[0] = bad
                    loss = loss + (param * weight.reshape(param.shape)).float().sum()
            if loss.requires_grad:
                optimizer.backward(loss)

    def step(self) -> None:
        """Step both with what backward has left."""
        self.do(lambda optimizer: optimizer.step())

    def check(self) -> None:
        """Compare everything that both show."""
        ours, theirs = (observed(*side) for side in self.both())
        assert ours.keys() == theirs.keys()
        for what in theirs:
            assert ours[what] == theirs[what], what


def runs_of_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton's own Python launches from now on."""
    names: list[str] = []
    run = triton.runtime.jit.JITFunction.run

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        names.append(self.__name__)
        return run(self, *args, **named)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", counted)
    return names
