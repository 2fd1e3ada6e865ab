"""apex's tests of FusedAdam and FusedLAMB, written anew: tests/L0/run_optimizers of its tree.

apex is in no package registry (the `apex` of the Python registry is another project). Its tests
hold ten steps beside torch's, with a limit of 1e-3 on the difference; beside a LAMB in plain torch
where torch has none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import Parameter

from twinstep.parity.proof.compat.cases import Case, Differs, Side, expect

SIZES = ((4096,), (64, 72), (1, 3), (7,), (5, 6, 7))
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "options": {"lr": 1e-2, "betas": (0.6, 0.9), "eps": 3e-6, "weight_decay": 0.1},
}
Shapes = Sequence[tuple[int, ...]]
Maker = Callable[[Side, Sequence[Parameter]], torch.optim.Optimizer]


def cases() -> Iterator[Case]:
    """Yield every test with every set of arguments."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, options, mode in product(dtypes, OPTIONS, (True, False)):
        words = f"{str(dtype)[6:]}, {options}, {'AdamW' if mode else 'Adam'}"
        run = partial(_ten_steps, SIZES[:1], dtype, *_adams(OPTIONS[options], mode))
        yield _case("fused_adam", words, run)
    many = partial(_ten_steps, SIZES, torch.float32, *_adams(OPTIONS["options"], True))
    yield _case("fused_adam multi_params", "five shapes", many)
    double = partial(_ten_steps, SIZES[:1], torch.float64, *_adams(OPTIONS["plain"], True))
    fp64 = ("parameter is float64", "refused: fp64 parameters")
    yield _case("fused_adam", "float64", double, fp64)
    yield _case("channels_last", "a convolution", _channels_last)
    yield _case("frozen model", "one parameter of two", _frozen)
    for drop in (True, False):
        yield _case("zero_grad", f"set_grad_none={drop}", partial(_zeroed, "adam", drop))
    yield _case("signature", "lr by position", partial(_by_position, "adam"))
    yield _case("signature", "capturable=True", partial(_constructed, {"capturable": True}))
    master = {"capturable": True, "master_weights": True}
    none = ("unexpected keyword argument", "refused: masters are those of the wrappers")
    yield _case("signature", "master_weights=True", partial(_constructed, master), none)
    for mode in (0, 1):
        yield _case(
            "signature", f"adam_w_mode={mode}", partial(_constructed, {"adam_w_mode": mode})
        )
    yield _case("signature", "amsgrad=True is a RuntimeError", partial(_no_amsgrad, "adam"))
    for name in ("grads", "output_params", "scale", "grad_norms"):
        yield _case("step", f"{name} is a RuntimeError", partial(_old_argument, name))
    yield _case("state_dict", "step in the group", _group_counter)
    yield from _of_lamb()


def _of_lamb() -> Iterator[Case]:
    """Yield the cases of FusedLAMB."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, options, nvidia in product(dtypes, OPTIONS, (False, True)):
        words = f"{str(dtype)[6:]}, {options}, use_nvlamb={nvidia}"
        run = partial(_ten_steps, SIZES[:1], dtype, *_lambs(OPTIONS[options], nvidia))
        yield _case("fused_lamb", words, run)
    for options, nvidia in product(OPTIONS, (False, True)):
        words = f"five shapes, {options}, use_nvlamb={nvidia}"
        run = partial(_ten_steps, SIZES, torch.float32, *_lambs(OPTIONS[options], nvidia))
        yield _case("fused_lamb multi_params", words, run)
    for option in ({"max_grad_norm": 0.0}, {"grad_averaging": False}, {"bias_correction": False}):
        lambs = _lambs({**OPTIONS["options"], **option}, False)
        words = ", ".join(f"{name}={value}" for name, value in option.items())
        run = partial(_ten_steps, SIZES[:1], torch.float32, *lambs)
        yield _case("fused_lamb lamb_option", words, run)
    double = partial(_ten_steps, SIZES[:1], torch.float64, *_lambs(OPTIONS["plain"], False))
    fp64 = ("parameter is float64", "refused: fp64 parameters")
    yield _case("fused_lamb", "float64", double, fp64)
    for drop in (True, False):
        words = f"FusedLAMB, set_grad_none={drop}"
        yield _case("zero_grad", words, partial(_zeroed, "apex_lamb", drop))
    yield _case("signature", "FusedLAMB, lr by position", partial(_by_position, "apex_lamb"))
    none = partial(_no_amsgrad, "apex_lamb")
    yield _case("signature", "FusedLAMB, amsgrad=True is a RuntimeError", none)


def _case(
    test: str, case: str, run: Callable[[Side], None], known: tuple[str, str] = ("", "")
) -> Case:
    return Case(project="apex", test=test, case=case, run=run, known=known)


def _adams(options: dict[str, Any], mode: bool) -> tuple[Maker, Maker]:
    """FusedAdam of a side, and what torch has for it."""
    kind: Callable[..., Any] = torch.optim.AdamW if mode else torch.optim.Adam
    return (
        lambda side, params: side.adam(params, adam_w_mode=mode, **options),
        lambda _, params: kind(params, **options),
    )


def _lambs(options: dict[str, Any], nvidia: bool) -> tuple[Maker, Maker]:
    """FusedLAMB of a side, and a LAMB in torch."""
    return (
        lambda side, params: side.apex_lamb(params, use_nvlamb=nvidia, **options),
        lambda _, params: TorchLamb(params, use_nvlamb=nvidia, **options),
    )


class TorchLamb(torch.optim.Optimizer):
    """LAMB as You et al. (2020) have it, over gradients clipped by the norm of all of them."""

    def __init__(
        self,
        params: Sequence[Parameter],
        *,
        max_grad_norm: float = 1.0,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        **options: Any,
    ) -> None:
        more = {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        super().__init__(params, {"max_grad_norm": max_grad_norm, **more, **options})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of one group."""
        (group,) = self.param_groups
        self.steps += 1
        held: list[Parameter] = group["params"]
        grads = [param.grad for param in held if param.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        limit = group["max_grad_norm"]
        divisor = norm / limit if limit > 0 and norm > limit else torch.ones(())
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        for param, grad in zip(held, grads, strict=True):
            clipped = grad / divisor
            state = self.state[param]
            first = state["m"] = beta1 * state.get("m", 0.0) + share * clipped
            second = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * clipped**2
            if group["bias_correction"]:
                first = first / (1 - beta1**self.steps)
                second = second / (1 - beta2**self.steps)
            update = first / (second.sqrt() + group["eps"]) + decay * param
            adapts = group["use_nvlamb"] or decay != 0
            ratio = param.norm() / update.norm() if adapts else torch.ones(())
            param.sub_(group["lr"] * ratio * update)


def _ten_steps(
    shapes: Shapes, dtype: torch.dtype, own_of: Maker, theirs_of: Maker, side: Side
) -> None:
    """Ten steps; torch steps in fp32 what is 16 bits wide, from the same gradients."""
    torch.manual_seed(9876)
    wide = dtype if dtype is torch.float64 else torch.float32
    starts = [torch.rand(shape).to(dtype) for shape in shapes]
    params = [Parameter(start.clone()) for start in starts]
    others = [Parameter(start.to(wide)) for start in starts]
    own, theirs = own_of(side, params), theirs_of(side, others)
    for _ in range(10):
        for param, other in zip(params, others, strict=True):
            param.grad = torch.rand(param.shape).to(dtype)
            other.grad = param.grad.to(wide)
        own.step()
        theirs.step()
        if dtype not in (torch.float32, torch.float64):
            # From where 16 bits have come, as apex's test does.
            for param, other in zip(params, others, strict=True):
                worst = (param.to(wide) - other).abs().max().item()
                expect(worst < (1e-3 if dtype is torch.float16 else 1e-2), True, f"{worst} small")
                other.data.copy_(param.detach())
    for param, other in zip(params, others, strict=True):
        worst = (param.to(wide) - other).abs().max().item()
        if not worst < 1e-3:
            raise Differs(f"weights are {worst} from torch's")


def _channels_last(side: Side) -> None:
    """A model in another memory format steps like the same model in rows."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(4, 8, 3)
    other = copy.deepcopy(model)
    for param in other.parameters():
        if param.dim() == 4:
            param.data = param.data.to(memory_format=torch.channels_last)
    inputs = torch.rand(2, 4, 6, 6)
    optimizers = [side.adam(one.parameters(), lr=0.01) for one in (model, other)]
    for _ in range(3):
        for one, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(one(inputs).square().sum())
            optimizer.step()
    if not torch.allclose(model.weight, other.weight, rtol=1e-3, atol=1e-3):
        raise Differs("weights in channels_last are others")


def _frozen(side: Side) -> None:
    """A parameter that takes no gradient stays."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3), requires_grad=False)]
    optimizer = side.adam(params, lr=0.1)
    torch.autograd.backward(params[0].sum())
    optimizer.step()
    expect(params[1].tolist(), [1.0] * 3, "frozen weight")
    expect(params[0].tolist() == [1.0] * 3, False, "the other standing still")


def _zeroed(kind: str, drop: bool, side: Side) -> None:
    """`zero_grad()` does what the constructor was told."""
    param = Parameter(torch.ones(3))
    optimizer = getattr(side, kind)([param], set_grad_none=drop)
    param.grad = torch.ones(3)
    optimizer.zero_grad()
    expect(param.grad is None, drop, "grad is None")


def _by_position(kind: str, side: Side) -> None:
    """The rate is the second argument."""
    optimizer = getattr(side, kind)([Parameter(torch.ones(1))], 0.25)
    expect(optimizer.param_groups[0]["lr"], 0.25, "lr")


def _constructed(options: dict[str, Any], side: Side) -> None:
    """A constructor takes these keywords and steps."""
    param = Parameter(torch.ones(3))
    optimizer = side.adam([param], lr=0.1, **options)
    param.grad = torch.ones(3)
    optimizer.step()
    expect(param[0].item() < 1.0, True, "moving")


def _no_amsgrad(kind: str, side: Side) -> None:
    try:
        getattr(side, kind)([Parameter(torch.ones(1))], amsgrad=True)
    except RuntimeError:
        return
    raise Differs("no error")


def _old_argument(name: str, side: Side) -> None:
    """Arguments that an earlier step took."""
    optimizer = side.adam([Parameter(torch.ones(1))])
    try:
        optimizer.step(**{name: [torch.ones(1)]})
    except RuntimeError:
        return
    raise Differs("no error")


def _group_counter(side: Side) -> None:
    """A file of apex's has one counter for a group, and goes on from it."""
    params = [Parameter(torch.ones(3))]
    optimizer = side.adam(params, lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["step"] = 4
    state["state"] = {0: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}
    optimizer.load_state_dict(state)
    params[0].grad = torch.ones(3)
    optimizer.step()
    expect(int(optimizer.state[params[0]]["step"]), 5, "step")
