"""One call of one operation, and how each side answers it.

A `Call` is plain data, so both sides provably get the same input: the reference reads it, the fast
side writes into clones of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import twinstep.fast.kernels.accumulate
import twinstep.fast.kernels.adam
import twinstep.fast.kernels.cast
import twinstep.fast.kernels.clip
import twinstep.fast.kernels.mixed_step
import twinstep.fast.kernels.pack
import twinstep.fast.kernels.reduce
import twinstep.fast.kernels.unscale
from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import operation_named
from twinstep.scenarios.plan import Settings
from twinstep.scenarios.state import State, float_control

Value = list[Tensor] | Tensor
Written = dict[str, Value]
FAST: Mapping[str, Callable[..., None]] = {
    "accumulate": twinstep.fast.kernels.accumulate.accumulate_,
    "adamw_step": twinstep.fast.kernels.adam.adamw_step_,
    "cast_copy": twinstep.fast.kernels.cast.cast_copy_,
    "clip_factor": twinstep.fast.kernels.clip.clip_factor_,
    "flatten": twinstep.fast.kernels.pack.flatten_,
    "global_norm": twinstep.fast.kernels.reduce.global_norm_,
    "mixed_step": twinstep.fast.kernels.mixed_step.mixed_step_,
    "unflatten": twinstep.fast.kernels.pack.unflatten_,
    "unscale": twinstep.fast.kernels.unscale.unscale_,
}
CPU = torch.device("cpu")
Answer = Callable[["Call"], Written]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one operation, by name; lists come first and keep their order."""

    operation: str
    lists: Mapping[str, list[Tensor]]
    controls: Mapping[str, Tensor]
    options: Mapping[str, bool | int | str] = field(default_factory=dict)

    @property
    def contract(self) -> Operation:
        """The operation's contract: its reference function and what it writes."""
        return operation_named(self.operation, "scenarios")


def reference_answer(call: Call) -> Written:
    """What the reference returns for a call, by argument name; the call's tensors stay as they are.

    Returns:
        One entry per written argument, in the contract's order.
    """
    returned: Any = call.contract.reference(*call.lists.values(), **call.controls, **call.options)
    return dict(zip(call.contract.writes, returned, strict=True))


def fast_answer(call: Call, device: torch.device = CPU) -> Written:
    """What our fast kernel writes for a call, by argument name, brought back to the CPU.

    The kernel runs on clones, so the call's tensors stay as they are. On CPU tensors the Triton
    launchers need `replay.activate()`.
    """
    lists = {name: [placed(t, device) for t in ts] for name, ts in call.lists.items()}
    controls = {name: placed(t, device) for name, t in call.controls.items()}
    FAST[call.operation](*lists.values(), **controls, **call.options)
    written: dict[str, Value] = {**lists, **controls}
    return {name: on_cpu(written[name]) for name in call.contract.writes}


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor on a device, in storage of its own."""
    return tensor.to(device, copy=True)


def on_cpu(value: Value) -> Value:
    """The same values on the CPU."""
    return [t.cpu() for t in value] if isinstance(value, list) else value.cpu()


def adam_controls(settings: Settings, lr: float) -> dict[str, Tensor]:
    """The controls that Adam's step and the mixed step share."""
    return {
        "lr": float_control(lr),
        "beta1": float_control(settings.beta1),
        "beta2": float_control(settings.beta2),
        "eps": float_control(settings.eps),
        "weight_decay": float_control(settings.weight_decay),
    }


def mixed_step(state: State, grads: list[Tensor], settings: Settings, lr: float) -> Call:
    """The whole step: overflow test, norm, clipping, AdamW and the loss-scale rule.

    Args:
        state: read only; its lists and `grads` have one tensor per parameter, or one flat buffer.
        grads: gradients of the scaled loss, in the model's dtype.
        settings: hyper-parameters and the loss-scale rule.
        lr: the learning rate of this step.
    """
    lists = ("params", "exp_avgs", "exp_avg_sqs", "copies", "steps")
    entries = dict(state.items())
    held = {n: list(v) for n, v in entries.items() if isinstance(v, list)}
    return Call(
        operation="mixed_step",
        lists={"params": held["params"], "grads": grads, **{n: held[n] for n in lists[1:]}},
        controls={
            **adam_controls(settings, lr),
            "max_norm": float_control(settings.max_norm),
            "scale_factor": float_control(settings.scale_factor),
            "scale_window": torch.tensor(settings.scale_window),
            "min_scale": float_control(settings.min_scale),
            "delayed_shift": torch.tensor(settings.delayed_shift),
            "backoff_factor": float_control(1.0 / settings.scale_factor),
            **{n: v for n, v in entries.items() if isinstance(v, Tensor)},
        },
        options={
            "adam_w_mode": True,
            "bias_correction": True,
            "rule": settings.rule,
            "consecutive_hysteresis": False,
            "raise_error_at_min_scale": False,
        },
    )


def adamw_step(
    state: State,
    grads: list[Tensor],
    settings: Settings,
    *,
    lr: float,
    factor: Tensor,
    found_inf: Tensor,
) -> Call:
    """Only the update, with the factor and the overflow flag that the smaller operations gave."""
    return Call(
        operation="adamw_step",
        lists={
            "params": state.params,
            "grads": grads,
            "exp_avgs": state.exp_avgs,
            "exp_avg_sqs": state.exp_avg_sqs,
            "copies": state.copies,
            "steps": state.steps,
        },
        controls={**adam_controls(settings, lr), "factor": factor, "found_inf": found_inf},
        options={"bias_correction": True},
    )


def global_norm(grads: list[Tensor]) -> Call:
    """Norm and overflow test of the scaled gradients."""
    zero = float_control(0.0, torch.float32)
    return Call(
        operation="global_norm",
        lists={"grads": grads},
        controls={"norm": zero, "found_inf": zero.clone()},
    )


def clip_factor(norm: Tensor, scale: Tensor, settings: Settings) -> Call:
    """The number that unscales and clips in one multiplication."""
    return Call(
        operation="clip_factor",
        lists={},
        controls={
            "norm": norm,
            "scale": scale,
            "max_norm": float_control(settings.max_norm),
            "factor": float_control(0.0, torch.float32),
        },
    )


def unscale(grads: list[Tensor], scale: Tensor) -> Call:
    """Gradients divided by the scale, in place, in their own dtype."""
    return Call(
        operation="unscale",
        lists={"grads": grads},
        controls={
            "inv_scale": (1.0 / scale).float(),
            "found_inf": float_control(0.0, torch.float32),
        },
    )


def cast_copy(sources: list[Tensor], copies: list[Tensor]) -> Call:
    """Masters rounded once into the model's dtype."""
    return Call(
        operation="cast_copy",
        lists={"sources": sources, "copies": copies},
        controls={},
    )


def accumulate(accumulators: list[Tensor], grads: list[Tensor]) -> Call:
    """One rank's gradients added to the fp32 sum of the ranks before it."""
    return Call(
        operation="accumulate",
        lists={"accumulators": accumulators, "grads": grads},
        controls={},
    )


def flatten(tensors: list[Tensor], flat: Tensor, slot: int) -> Call:
    """Tensors laid into one buffer, each at the next multiple of `slot` elements."""
    return Call(
        operation="flatten",
        lists={"tensors": tensors, "flat": [flat]},
        controls={},
        options={"slot": slot},
    )


def unflatten(flat: Tensor, tensors: list[Tensor], slot: int) -> Call:
    """The buffer read back into tensors."""
    return Call(
        operation="unflatten",
        lists={"flat": [flat], "tensors": tensors},
        controls={},
        options={"slot": slot},
    )


def tensors(written: Written, name: str) -> list[Tensor]:
    """A written argument that is a list."""
    value = written[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is one tensor, but should be a list [calls.tensors]")
    return value


def scalar(written: Written, name: str) -> Tensor:
    """A written argument that is a control."""
    value = written[name]
    if isinstance(value, list):
        raise TypeError(f"{name} is a list, but should be one tensor [calls.scalar]")
    return value


def state_of(written: Written) -> State:
    """The state that a `mixed_step` wrote."""
    return State(**written)  # type: ignore[arg-type]  # names and kinds are State's own
