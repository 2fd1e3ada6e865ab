"""apex's tests of FusedAdam, written anew: tests/L0/run_optimizers of its tree.

apex is in no package registry (the `apex` of the Python registry is another project). Its tests
hold ten steps beside torch's, with a limit of 1e-3 on the difference.
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


def cases() -> Iterator[Case]:
    """Yield every test with every set of arguments."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, options, mode in product(dtypes, OPTIONS, (True, False)):
        words = f"{str(dtype)[6:]}, {options}, {'AdamW' if mode else 'Adam'}"
        run = partial(_beside_torch, SIZES[:1], dtype, OPTIONS[options], mode)
        yield _case("fused_adam", words, run)
    many = partial(_beside_torch, SIZES, torch.float32, OPTIONS["options"], True)
    yield _case("fused_adam multi_params", "five shapes", many)
    double = partial(_beside_torch, SIZES[:1], torch.float64, OPTIONS["plain"], True)
    fp64 = ("parameter is float64", "refused: fp64 parameters")
    yield _case("fused_adam", "float64", double, fp64)
    yield _case("channels_last", "a convolution", _channels_last)
    yield _case("frozen model", "one parameter of two", _frozen)
    for drop in (True, False):
        yield _case("zero_grad", f"set_grad_none={drop}", partial(_zeroed, drop))
    yield _case("signature", "lr by position", _by_position)
    yield _case("signature", "capturable=True", partial(_constructed, {"capturable": True}))
    master = {"capturable": True, "master_weights": True}
    none = ("unexpected keyword argument", "refused: masters are those of the wrappers")
    yield _case("signature", "master_weights=True", partial(_constructed, master), none)
    for mode in (0, 1):
        yield _case(
            "signature", f"adam_w_mode={mode}", partial(_constructed, {"adam_w_mode": mode})
        )
    yield _case("signature", "amsgrad=True is a RuntimeError", _no_amsgrad)
    for name in ("grads", "output_params", "scale", "grad_norms"):
        yield _case("step", f"{name} is a RuntimeError", partial(_old_argument, name))
    yield _case("state_dict", "step in the group", _group_counter)


def _case(
    test: str, case: str, run: Callable[[Side], None], known: tuple[str, str] = ("", "")
) -> Case:
    return Case(project="apex", test=test, case=case, run=run, known=known)


def _beside_torch(
    shapes: Shapes, dtype: torch.dtype, options: dict[str, Any], mode: bool, side: Side
) -> None:
    """Ten steps; torch steps in fp32 what is 16 bits wide, from the same gradients."""
    torch.manual_seed(9876)
    wide = dtype if dtype is torch.float64 else torch.float32
    starts = [torch.rand(shape).to(dtype) for shape in shapes]
    params = [Parameter(start.clone()) for start in starts]
    others = [Parameter(start.to(wide)) for start in starts]
    own = side.adam(params, adam_w_mode=mode, **options)
    kind: Callable[..., Any] = torch.optim.AdamW if mode else torch.optim.Adam
    theirs = kind(others, **options)
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


def _zeroed(drop: bool, side: Side) -> None:
    """`zero_grad()` does what the constructor was told."""
    param = Parameter(torch.ones(3))
    optimizer = side.adam([param], set_grad_none=drop)
    param.grad = torch.ones(3)
    optimizer.zero_grad()
    expect(param.grad is None, drop, "grad is None")


def _by_position(side: Side) -> None:
    """The rate is the second argument."""
    optimizer = side.adam([Parameter(torch.ones(1))], 0.25)
    expect(optimizer.param_groups[0]["lr"], 0.25, "lr")


def _constructed(options: dict[str, Any], side: Side) -> None:
    """A constructor takes these keywords and steps."""
    param = Parameter(torch.ones(3))
    optimizer = side.adam([param], lr=0.1, **options)
    param.grad = torch.ones(3)
    optimizer.step()
    expect(param[0].item() < 1.0, True, "moving")


def _no_amsgrad(side: Side) -> None:
    try:
        side.adam([Parameter(torch.ones(1))], amsgrad=True)
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
