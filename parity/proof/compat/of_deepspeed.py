"""DeepSpeed's tests of its 16-bit optimizers, written anew from the numbers that they document.

Its distributions ship none of them. Names are those of its tree under tests/unit; what they expect
is restated here as a rule of a few lines, over classes of ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from twinstep.contract.compat import Compat
from twinstep.fast.deepspeed_schedules import schedule_of
from twinstep.parity.proof.compat.cases import Case, Differs, Side, expect

HALF, BRAIN = torch.float16, torch.bfloat16
COMPATS = {"default": Compat(), "Compat.deepspeed()": Compat.deepspeed()}
WRAPPERS = ("flat", "unfused")
INF, NAN = math.inf, math.nan


def cases() -> Iterator[Case]:
    """Yield every test with every set of arguments."""
    yield from _dynamic_loss_scale()
    yield from _hysteresis()
    yield from _half_precision()
    yield from _norms()
    yield from _validation()
    yield from _adam()
    yield from _schedules()
    yield from _checkpoints()


def _case(
    test: str,
    case: str,
    run: Callable[..., None],
    *arguments: Any,
    known: tuple[str, str] = ("", ""),
) -> Case:
    return Case(
        project="DeepSpeed", test=test, case=case, run=partial(run, *arguments), known=known
    )


def _wrapped(
    kind: str, side: Side, params: Sequence[Parameter], inside: Any = None, **options: Any
) -> Any:
    """A wrapper of ours around Adam, quiet."""
    made = {"flat": side.flat, "unfused": side.unfused}[kind]
    return made(inside or side.adam(params, lr=0.015), verbose=False, **options)


def _given(params: Sequence[Parameter], value: float) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)


def _scales(kind: str, values: Sequence[float], power: int, compat: Compat, side: Side) -> None:
    """The scale and the number of steps after each gradient.

    A scale doubles in the step after two clean ones, and halves in a step with an overflow, down to
    1; clean steps are counted from the last overflow.
    """
    params = [Parameter(torch.ones(10, dtype=HALF))]
    args = {"init_scale": 2.0**power, "scale_window": 2, "min_scale": 1}
    optimizer = _wrapped(
        kind, side, params, dynamic_loss_scale=True, dynamic_loss_args=args, compat=compat
    )
    wanted, clean = 2.0**power, 0
    for step, value in enumerate(values):
        _given(params, value)
        optimizer.step()
        overflow = not math.isfinite(value)
        if overflow:
            wanted, clean = max(wanted / 2, 1.0), 0
        else:
            wanted, clean = (wanted * 2, 1) if clean == 2 else (wanted, clean + 1)
        expect(optimizer.cur_scale, wanted, f"scale after step {step}")
        expect(optimizer.cur_iter, step + 1, f"steps after step {step}")
        expect(optimizer.overflow, overflow, f"overflow of step {step}")


def _dynamic_loss_scale() -> Iterator[Case]:
    """half_precision/test_dynamic_loss_scale.py: TestFused and TestUnfused."""
    sequences = {
        "no_overflow": (8, [0.05, -0.1, 0.02, 0.09, -0.03, 0.1, 0.07, -0.08, 0.01, 0.04]),
        "all_overflow": (4, [INF, -INF, *[NAN] * 4, *[INF] * 4]),
        "some_overflow": (8, [INF, NAN, -INF, 0.1, -0.1, 0.05, INF, NAN, *[0.02] * 5]),
    }
    for kind, name, compat in product(WRAPPERS, sequences, COMPATS):
        power, values = sequences[name]
        yield _case(
            f"dynamic_loss_scale {name}",
            f"{kind}, {compat}",
            _scales,
            *(kind, values, power, COMPATS[compat]),
        )


def _spends(kind: str, by: str, hysteresis: int, overflows: int, side: Side) -> None:
    """Overflows are let pass until as many as the hysteresis have come; then the scale halves."""
    params = [Parameter(torch.ones(10, dtype=HALF))]
    options: dict[str, Any] = {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {
            **{"init_scale": 2.0**16, "scale_window": 2, "min_scale": 1},
            "delayed_shift": hysteresis,
        },
    }
    if by == "loss_scale_config":
        scaler = side.dynamic(
            init_scale=2.0**16, scale_window=2, min_scale=1.0, delayed_shift=hysteresis
        )
        options = {"loss_scale_config": scaler}
    optimizer = _wrapped(kind, side, params, **options)
    for step in range(overflows):
        _given(params, NAN)
        optimizer.step()
        wanted = 2.0 ** (16 - max(0, step + 2 - hysteresis))
        expect(optimizer.cur_scale, wanted, f"scale after overflow {step}")


def _hysteresis() -> Iterator[Case]:
    """TestZeroStage0Hysteresis of the main branch, which is newer than 0.19.8."""
    ignored = "as 0.19.8, whose wrappers have no hysteresis; `loss_scale_config` has it"
    for kind, by, count in product(
        WRAPPERS, ("loss_scale_config", "dynamic_loss_args"), (1, 2, 3, 4)
    ):
        known = ("scale after overflow 0", ignored)
        yield _case(
            "dynamic_loss_scale hysteresis (main)",
            f"{kind}, {count} by {by}",
            *(_spends, kind, by, count, 6),
            known=known if by == "dynamic_loss_args" and count > 1 else ("", ""),
        )


class _Pair(nn.Module):
    """Two layers, of which the second may stand aside."""

    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.one, self.two, self.aside = nn.Linear(10, 10), nn.Linear(10, 10), aside

    def forward(self, x: Tensor) -> Tensor:
        """The first layer, and the second unless it stands aside."""
        hidden: Tensor = self.one(x)
        return hidden if self.aside else cast(Tensor, self.two(hidden))


def _trained(model: nn.Module, optimizer: Any, dtype: torch.dtype, steps: int = 10) -> None:
    """Steps on one batch; the loss is smaller after them.

    Raises:
        Differs: it is not.
    """
    torch.manual_seed(1)
    inputs, losses = torch.randn(8, 10, dtype=dtype), []
    for _ in range(steps):
        loss = (model(inputs).float() - 1.0).square().mean()
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if not losses[-1] < losses[0]:
        raise Differs(f"losses are {losses}, but should become smaller")


def _trains(kind: str, inner: str, dtype: torch.dtype, aside: bool, side: Side) -> None:
    """Ten batches with clipping; a layer that gets no gradient is fine."""
    torch.manual_seed(0)
    model = _Pair(aside).to(dtype)
    params = list(model.parameters())
    makes: dict[str, Callable[..., Any]] = {
        **{"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD},
        **{"FusedAdam": side.adam, "FusedLamb": side.lamb},
    }
    inside = makes[inner](params, lr=0.01)
    if kind == "bf16":
        named = {param: name for name, param in model.named_parameters()}
        optimizer = side.bf16(inside, param_names=named, clip_grad=1.0)
    else:
        options = {"low_precision_dtype": dtype, "clip_grad": 1.0}
        optimizer = _wrapped(kind, side, params, inside, static_loss_scale=128.0, **options)
    _trained(model, optimizer, dtype)


def _static(kind: str, scale: float, side: Side) -> None:
    """A static scale multiplies losses, and stays."""
    params = [Parameter(torch.ones(10, dtype=HALF))]
    optimizer = _wrapped(kind, side, params, static_loss_scale=scale)
    optimizer.backward(params[0].float().sum())
    found = params[0].grad
    expect(None if found is None else found[0].item(), scale, "scaled gradient")
    for value in (1.0, INF, 1.0):
        _given(params, value)
        optimizer.step()
        expect((optimizer.cur_scale, optimizer.dynamic_loss_scale), (scale, False), "scale")


def _half_precision() -> Iterator[Case]:
    """half_precision/test_fp16.py and test_bf16.py."""
    inners = ("Adam", "AdamW", "SGD", "FusedAdam", "FusedLamb")
    for kind, inner in product(WRAPPERS, inners):
        if (kind, inner) != ("flat", "FusedLamb"):
            yield _case("fp16 basic", f"{kind}, {inner}", _trains, kind, inner, HALF, False)
            yield _case("fp16 empty_grad", f"{kind}, {inner}", _trains, kind, inner, HALF, True)
    for kind, aside in product((*WRAPPERS, "bf16"), (False, True)):
        words = f"{kind}{', a layer without gradients' if aside else ''}"
        yield _case("bf16 basic", words, _trains, kind, "FusedAdam", BRAIN, aside)
    for kind, scale in product(WRAPPERS, (1.0, 138.0, 1024.0)):
        yield _case("fp16 static loss scale", f"{kind}, {scale:g}", _static, kind, scale)


def _norm(kind: str, clip: float, compat: Compat, side: Side) -> None:
    """The reported norm is that of unscaled gradients, before clipping."""
    params = [Parameter(torch.zeros(4, dtype=HALF)), Parameter(torch.zeros(5, dtype=HALF))]
    optimizer = _wrapped(kind, side, params, static_loss_scale=64.0, clip_grad=clip, compat=compat)
    _given(params, 2.0 * 64.0)
    optimizer.step()
    expect(optimizer._global_grad_norm, 6.0, "norm")


def _guarded(kind: str, value: float, side: Side) -> None:
    """A gradient that is not finite changes no weight, and the next step goes on."""
    params = [Parameter(torch.ones(6, dtype=BRAIN))]
    if kind == "bf16":
        optimizer = side.bf16(side.adam(params, lr=0.1), param_names={params[0]: "p"})
    else:
        optimizer = _wrapped(kind, side, params, low_precision_dtype=BRAIN)
    for given, moves in ((value, False), (1.0, True)):
        before = params[0].detach().clone()
        _given(params, given)
        if kind == "bf16":
            optimizer.update_hp_grads()
        optimizer.step()
        optimizer.zero_grad()
        expect(not torch.equal(before, params[0].detach()), moves, f"moving by {given}")


def _experts(norm: float, compat: Compat, side: Side) -> None:
    """Clipping of the unfused class where one parameter is an expert."""
    params = [Parameter(torch.zeros(9, dtype=HALF)), Parameter(torch.zeros(16, dtype=HALF))]
    params[1].allreduce = False  # type: ignore[attr-defined]
    params[1].group_name = "experts"  # type: ignore[attr-defined]
    inside = torch.optim.SGD(params, lr=1.0)
    optimizer = _wrapped(
        "unfused", side, params, inside, clip_grad=1.0, has_moe_layers=True, compat=compat
    )
    _given(params, 2.0)
    optimizer.step()
    expect(round(-params[0][0].item(), 4), round(2.0 / norm, 4), "clipped step")


def _norms() -> Iterator[Case]:
    """test_unfused_optimizer.py, test_bf16_grad_norm_guard.py, test_unfused_moe_clip_norm.py."""
    both = Compat()
    for kind, clip in product(WRAPPERS, (0.0, 1.0)):
        yield _case("reported norm (main)", f"{kind}, clip {clip:g}", _norm, kind, clip, both)
    scaled = Compat(report_scaled_norm=True)
    yield _case(
        "reported norm (main)",
        "unfused, Compat(report_scaled_norm=True)",
        *(_norm, "unfused", 0.0, scaled),
        known=("norm is 384.0", "on request: 0.19.8 reports the norm with the scale in it"),
    )
    for kind, value in product((*WRAPPERS, "bf16"), (INF, NAN)):
        yield _case("bf16 grad norm guard", f"{kind}, {value}", _guarded, kind, value)
    yield _case("unfused MoE clip norm", "experts count", _experts, 10.0, both)
    without = Compat(clip_without_experts=True)
    yield _case("unfused MoE clip norm", "experts left out", _experts, 6.0, without)


def _refused(kind: str, options: dict[str, Any], side: Side) -> None:
    """Loss scales that scale nothing are a ValueError."""
    try:
        _wrapped(kind, side, [Parameter(torch.ones(3, dtype=HALF))], **options)
    except ValueError:
        return
    raise Differs("no error")


def _validation() -> Iterator[Case]:
    """half_precision/test_loss_scale_validation.py."""
    for kind, scale in product(WRAPPERS, (0.0, -1.0, INF, NAN)):
        options = {"static_loss_scale": scale}
        yield _case("loss scale validation (main)", f"{kind}, {scale}", _refused, kind, options)
    for kind, scale in product(WRAPPERS, (-2.0, INF)):
        args = {"init_scale": scale, "scale_window": 2, "min_scale": 1.0}
        moving: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": args}
        yield _case(
            "loss scale validation (main)", f"{kind}, dynamic {scale}", _refused, kind, moving
        )


def _as_torch(size: int, dtype: torch.dtype, decoupled: bool, decay: float, side: Side) -> None:
    """Ten steps as torch's Adam or AdamW takes them."""
    torch.manual_seed(size)
    start = torch.randn(size).to(dtype)
    params = [Parameter(start.clone()), Parameter(start.clone())]
    kind: Callable[..., Any] = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([params[0]], lr=1e-3, weight_decay=decay)
    own = side.adam([params[1]], lr=1e-3, weight_decay=decay, adam_w_mode=decoupled)
    for _ in range(10):
        grad = torch.randn(size).to(dtype)
        for param, optimizer in zip(params, (theirs, own), strict=True):
            param.grad = grad.clone()
            optimizer.step()
    relative, absolute = (0.05, 1e-2) if dtype is BRAIN else (1e-5, 1e-6)
    if not torch.allclose(params[0], params[1], rtol=relative, atol=absolute):
        worst = (params[0] - params[1]).abs().max().item()
        raise Differs(f"weights are {worst} from torch's")


def _adam() -> Iterator[Case]:
    """ops/adam/test_adamw.py and test_cpu_adam.py."""
    sizes = (64, 22, 55, 127, 1024, 4096)
    for size, dtype, decoupled in product(sizes, (torch.float32, BRAIN), (True, False)):
        words = f"{size}, {str(dtype)[6:]}, {'AdamW' if decoupled else 'Adam'}"
        yield _case("adam as torch's", words, _as_torch, size, dtype, decoupled, 0.1)
    yield _case("adam as torch's", "no decay", _as_torch, 127, torch.float32, True, 0.0)


def _rates(name: str, params: dict[str, Any], wanted: dict[int, float], _: Side) -> None:
    """Rates after some steps."""
    optimizer = torch.optim.AdamW([Parameter(torch.ones(1))], lr=0.1)
    schedule = schedule_of(name, params, optimizer)
    for step in range(max(wanted) + 1):
        schedule.step()
        rate = optimizer.param_groups[0]["lr"]
        if step in wanted and not math.isclose(rate, wanted[step], rel_tol=1e-12):
            raise Differs(f"rate of step {step} is {rate}, but should be {wanted[step]}")


def _schedules() -> Iterator[Case]:
    """runtime/test_lr_schedulers.py."""
    line = {"warmup_type": "linear", "warmup_max_lr": 0.01}
    warm = {"warmup_num_steps": 10, **line}
    size = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5}
    turn = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10}
    fades = {**turn, "decay_lr_rate": 0.5, "decay_step_size": 10}
    end = {**warm, "total_num_steps": 20}
    rows: list[tuple[str, str, dict[str, Any], dict[int, float]]] = [
        ("WarmupLR", "line", warm, {0: 0.0, 5: 0.005, 10: 0.01, 30: 0.01}),
        ("WarmupDecayLR", "line", end, {0: 0.0, 10: 0.01, 15: 0.005, 20: 0.0, 25: 0.0}),
        ("LRRangeTest", "line", size, {4: 0.02, 9: 0.03, 14: 0.04}),
        (
            *("LRRangeTest", "staircase"),
            *({**size, "lr_range_test_staircase": True}, {3: 0.01, 4: 0.02, 8: 0.02, 9: 0.03}),
        ),
        ("OneCycle", "up and down", turn, {4: 0.055, 9: 0.1, 14: 0.055, 19: 0.01, 40: 0.01}),
        ("OneCycle", "decay", fades, {9: 0.1, 19: 0.01, 29: 0.01 / 1.5, 39: 0.005}),
    ]
    for name, words, params, wanted in rows:
        yield _case("lr schedulers", f"{name}, {words}", _rates, name, params, wanted)


def _resumed(kind: str, inner: str, states: bool, side: Side) -> None:
    """A run goes on from its checkpoint, with or without states of the inner optimizer."""

    def _built() -> tuple[list[Parameter], Any]:
        params = [Parameter(torch.ones(5, dtype=HALF)), Parameter(torch.ones(2, 3, dtype=HALF))]
        make = side.adam if inner == "FusedAdam" else torch.optim.AdamW
        args = {"init_scale": 8.0, "scale_window": 2, "min_scale": 1.0}
        inside = make(params, lr=0.1)
        return params, _wrapped(
            kind, side, params, inside, dynamic_loss_scale=True, dynamic_loss_args=args
        )

    params, optimizer = _built()
    for value in (1.0, INF, 2.0):
        _given(params, value)
        optimizer.step()
    others, other = _built()
    for param, own in zip(others, params, strict=True):
        param.data.copy_(own.data)  # as the engine loads the model
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()), load_optimizer_states=states)
    expect((other.cur_scale, other.cur_iter), (optimizer.cur_scale, optimizer.cur_iter), "scale")
    for each, one in ((params, optimizer), (others, other)) if states else ():
        for value in (1.0, -3.0):
            _given(each, value)
            one.step()
    alike = all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    expect(alike, True, "equal weights")


def _checkpoints() -> Iterator[Case]:
    """checkpoint/test_other_optimizer.py, on one rank."""
    for kind, inner, states in product(WRAPPERS, ("FusedAdam", "AdamW"), (True, False)):
        words = f"{kind}, {inner}{'' if states else ', without states'}"
        yield _case("checkpoint", words, _resumed, kind, inner, states)
