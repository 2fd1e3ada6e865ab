"""One call of an operation, and the answer of each side.

A `Call` is plain data, so both sides provably get the same input: the reference reads it, the fast
side writes into clones of it. The reference runs on the CPU. The fast side runs on the GPU where
there is one; elsewhere its kernels in C++ run on the CPU, or those of a GPU are replayed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import cast

import torch
from torch import Tensor

from twinstep.fast.kernels.accumulate import accumulate_
from twinstep.fast.kernels.adam import adamw_step_
from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.kernels.clip import clip_factor_
from twinstep.fast.kernels.mixed_step import mixed_step_
from twinstep.fast.kernels.pack import flatten_, unflatten_
from twinstep.fast.kernels.reduce import global_norm_
from twinstep.fast.kernels.unscale import unscale_
from twinstep.parity.operations.operation import Operation, OptionValue
from twinstep.parity.operations.table import operation_named
from twinstep.parity.registry.engines import Engine, engine_named, running
from twinstep.scenarios.plan import DTYPES, Plan

Value = list[Tensor] | Tensor
Written = dict[str, Value]
FAST: Mapping[str, Callable[..., None]] = {
    "accumulate": accumulate_,
    "adamw_step": adamw_step_,
    "cast_copy": cast_copy_,
    "clip_factor": clip_factor_,
    "flatten": flatten_,
    "global_norm": global_norm_,
    "mixed_step": mixed_step_,
    "unflatten": unflatten_,
    "unscale": unscale_,
}
CPU = torch.device("cpu")
SIDES = ("reference", "fast")


@dataclass(frozen=True)
class Call:
    """Arguments of one operation, by name; lists keep their order."""

    operation: str
    lists: Mapping[str, list[Tensor]]
    controls: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, OptionValue] = field(default_factory=dict)

    @property
    def contract(self) -> Operation:
        """The operation's reference function, and what it writes."""
        return operation_named(self.operation, "scenarios")


Answer = Callable[[Call], Written]


def reference_answer(call: Call) -> Written:
    """The reference's results by argument name; the call's tensors stay unchanged."""
    results = call.contract.reference(*call.lists.values(), **call.controls, **call.options)
    return dict(zip(call.contract.writes, cast(tuple[Value, ...], results), strict=True))


def fast_answer(call: Call, device: torch.device = CPU) -> Written:
    """The results of our fast kernel by argument name, brought back to the CPU.

    The kernel runs on clones, so the call's tensors stay unchanged.
    """
    lists = {name: [t.to(device, copy=True) for t in ts] for name, ts in call.lists.items()}
    controls = {name: value.to(device, copy=True) for name, value in call.controls.items()}
    FAST[call.operation](*lists.values(), **controls, **call.options)
    written: Written = {**lists, **controls}
    return {name: _each(written[name], Tensor.cpu) for name in call.contract.writes}


def engine(*, replays: bool = False) -> Engine:
    """The place of the fast side on this machine: the GPU, or else the CPU.

    Args:
        replays: without a GPU, have replay execute the kernels that a GPU would run.
    """
    gpu = engine_named("cuda")
    return engine_named("replay" if replays else "cpu") if gpu.missing else gpu


@contextmanager
def device_of(side: str, *, replays: bool = False) -> Iterator[torch.device]:
    """The device on which a side steps; its engine runs for the length of the `with` block.

    Args:
        side: "reference" or "fast".
        replays: as in `engine`.

    Raises:
        ValueError: there is no side of that name.
    """
    if side not in SIDES:
        raise ValueError(f"side={side!r}, but should be one of {SIDES} [side]")
    if side == "reference":
        yield CPU
        return
    place = engine(replays=replays)
    with running(place):
        yield place.device


def answer_of(side: str, device: torch.device) -> Answer:
    """The answers of a side whose engine runs."""
    return reference_answer if side == "reference" else partial(fast_answer, device=device)


def control(value: float) -> Tensor:
    """A number as the 0-dim float64 tensor that operations take."""
    return torch.tensor(value, dtype=torch.float64)


def count(value: int) -> Tensor:
    """A counter as the 0-dim int64 tensor that operations take."""
    return torch.tensor(value, dtype=torch.int64)


def output() -> Tensor:
    """A 0-dim fp32 tensor to be written."""
    return torch.zeros((), dtype=torch.float32)


@dataclass(kw_only=True)
class State:
    """Everything that outlives a mixed-precision step, in the order in which `mixed_step` writes.

    Attributes:
        params: master weights, fp32; a flat buffer is a list of one, as for all lists.
        exp_avgs: first moments, fp32.
        exp_avg_sqs: second moments, fp32.
        copies: model weights in 16 bits; empty when the model runs on the masters themselves.
        steps: one 0-dim int64 per tensor.
        norm: fp32, global norm of the last step's unscaled gradients.
        found_inf: fp32, 1.0 if the last step was skipped.
    """

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    copies: list[Tensor]
    steps: list[Tensor]
    scale: Tensor
    cur_iter: Tensor = field(default_factory=lambda: count(0))
    last_overflow_iter: Tensor = field(default_factory=lambda: count(-1))
    cur_hysteresis: Tensor = field(default_factory=lambda: count(1))
    growth_tracker: Tensor = field(default_factory=lambda: count(0))
    exhausted: Tensor = field(default_factory=lambda: count(0))
    norm: Tensor = field(default_factory=output)
    found_inf: Tensor = field(default_factory=output)

    @classmethod
    def initial(cls, weights: Sequence[Tensor], plan: Plan) -> State:
        """The state before the first step: masters and their copies, moments and counters zero."""
        masters = [weight.clone() for weight in weights]
        return cls(
            params=masters,
            exp_avgs=[torch.zeros_like(master) for master in masters],
            exp_avg_sqs=[torch.zeros_like(master) for master in masters],
            copies=[m.to(DTYPES[plan.dtype]) for m in masters] if plan.dtype != "fp32" else [],
            steps=[count(0) for _ in masters],
            scale=control(plan.scaling[1]),
            cur_hysteresis=count(plan.delayed_shift),
        )

    @classmethod
    def of(cls, entries: Mapping[str, Value]) -> State:
        """The state with these entries, sharing their storage."""
        return cls(**entries)  # type: ignore[arg-type]  # names and kinds are State's own

    @property
    def entries(self) -> Written:
        """Every entry by name, in the order in which `mixed_step` writes them."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def weights(self) -> list[Tensor]:
        """The model's weights: the copies, or the masters where there are none."""
        return self.copies or self.params

    def clone(self) -> State:
        """A copy that shares no storage with this one."""
        return State.of({name: _each(v, Tensor.clone) for name, v in self.entries.items()})


def adam_controls(plan: Plan, lr: float) -> dict[str, Tensor]:
    """The controls that `adamw_step` and `mixed_step` share."""
    names = ("beta1", "beta2", "eps", "weight_decay")
    return {"lr": control(lr), **{name: control(getattr(plan, name)) for name in names}}


def mixed_step(state: State, grads: list[Tensor], plan: Plan, lr: float) -> Call:
    """The whole step: overflow test, norm, clipping, AdamW and the loss-scale rule.

    Args:
        state: read only; its lists and `grads` have one tensor per parameter, or one flat buffer.
        grads: gradients of the scaled loss, in the model's dtype.
        plan: hyper-parameters and the loss-scale rule.
        lr: the learning rate of this step.
    """
    return Call(
        "mixed_step",
        step_lists(state, grads),
        {
            **adam_controls(plan, lr),
            "max_norm": control(plan.max_norm),
            "scale_factor": control(plan.scale_factor),
            "scale_window": count(plan.scale_window),
            "min_scale": control(plan.min_scale),
            "delayed_shift": count(plan.delayed_shift),
            "backoff_factor": control(1.0 / plan.scale_factor),
            **{name: v for name, v in state.entries.items() if isinstance(v, Tensor)},
        },
        {
            "adam_w_mode": True,
            "bias_correction": True,
            "rule": plan.scaling[0],
            "consecutive_hysteresis": False,
            "raise_error_at_min_scale": False,
        },
    )


def step_lists(state: State, grads: list[Tensor]) -> dict[str, list[Tensor]]:
    """The lists of `adamw_step` and `mixed_step`, in their order."""
    return {
        "params": state.params,
        "grads": grads,
        "exp_avgs": state.exp_avgs,
        "exp_avg_sqs": state.exp_avg_sqs,
        "copies": state.copies,
        "steps": state.steps,
    }


def tensors(written: Mapping[str, Value], name: str) -> list[Tensor]:
    """A written argument that is a list."""
    value = written[name]
    assert isinstance(value, list), name
    return value


def scalar(written: Mapping[str, Value], name: str) -> Tensor:
    """A written argument that is a control."""
    value = written[name]
    assert isinstance(value, Tensor), name
    return value


def _each(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    return [change(tensor) for tensor in value] if isinstance(value, list) else change(value)
