"""Digests of the reference on fixed inputs; `--record` writes them.

    python -m twinstep.parity.proof.gates.digests [--record]

Inputs come from integers (`parity.cases.fixed_inputs`), never from torch's generator, so that a
moved digest can
only mean moved arithmetic.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from twinstep.golden.digests import FILE, Digests, read, to_text
from twinstep.parity.cases.fixed_inputs import anything, bits, moderate
from twinstep.parity.operations.buffers import accumulate, cast_copy, flatten, global_norm, unscale
from twinstep.parity.operations.scales import clip_factor
from twinstep.parity.operations.steps import mixed_step
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.apex_lamb import apex_lamb_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.lamb import lamb_step
from twinstep.reference.remainder import adamw_remainder_step
from twinstep.reference.sgd import sgd_step

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NAMES = {HALF: "fp16", BRAIN: "bf16", SINGLE: "fp32"}
COUNT = 257
Step = Callable[..., Sequence[object]]
Maker = Callable[[int, int, torch.dtype], Tensor]
MAKERS: dict[str, Maker] = {"moderate": moderate, "anything": anything}
HYPER = {"lr": 0.0123, "beta1": 0.87, "beta2": 0.993, "eps": 3e-7, "weight_decay": 0.07}
INCOMING = {
    "scale": 512.0,
    "scale_factor": 2.0,
    "min_scale": 0.25,
    "max_norm": 0.5,
    "backoff_factor": 0.5,
}
COUNTERS = {
    "cur_iter": 5,
    "last_overflow_iter": 2,
    "cur_hysteresis": 2,
    "growth_tracker": 1,
    "exhausted": 0,
    "scale_window": 2,
    "delayed_shift": 2,
}


def digest(outputs: Sequence[object]) -> str:
    """SHA-256 over shapes, dtypes and bits of all tensors, in order; every NaN counts as one."""
    state = hashlib.sha256()
    for tensor in _tensors(outputs):
        state.update(f"{tensor.dtype} {tuple(tensor.shape)} {bits(tensor)}\n".encode())
    return state.hexdigest()


def _tensors(outputs: Sequence[object]) -> Iterator[Tensor]:
    for output in outputs:
        if isinstance(output, Tensor):
            yield output
        elif isinstance(output, list):
            yield from _tensors(output)


def computed() -> dict[str, str]:
    """All digests by case, computed now."""
    return {name: digest(outputs) for name, outputs in _cases()}


def _cases() -> Iterator[tuple[str, Sequence[object]]]:
    for kind, make in MAKERS.items():
        for dtype, short in NAMES.items():
            for name, outputs in _steps(make, dtype):
                yield f"{name} {short} {kind}", outputs
            yield from _buffers(f"{short} {kind}", make, dtype)


def _state(make: Maker, dtype: torch.dtype) -> list[list[Tensor]]:
    """Lists of one: params, grads in dtype, two moments, copies in dtype, steps."""
    fp32 = [make(COUNT, seed, SINGLE) for seed in (1, 3, 4)]
    copies = [] if dtype == SINGLE else [torch.zeros(COUNT, dtype=dtype)]
    p, m, v = ([tensor] for tensor in fp32)
    return [p, [make(COUNT, 2, dtype)], m, [v[0].abs()], copies, [torch.tensor(6)]]


def _steps(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Sequence[object]]]:
    flags = {"factor": torch.tensor(1 / 512.0), "found_inf": torch.tensor(0.0)}
    usual = {**_numbers(HYPER), **flags, "bias_correction": True}
    yield "adam_step", _run(adam_step, make, dtype, **usual)
    yield "adamw_step", _run(adamw_step, make, dtype, **usual)
    if dtype != HALF:
        yield "adamw_remainder_step", _remainder(make, dtype, **usual)
    limits = _numbers({"max_coeff": 7.0, "min_coeff": 0.02})
    yield "lamb_step", _run(lamb_step, make, dtype, **usual, **limits, eps_inside_sqrt=False)
    clip = {**_numbers({"max_norm": 0.7}), "norm": torch.tensor(5.3 * 512)}
    modes = {"adam_w_mode": True, "grad_averaging": True, "use_nvlamb": False}
    yield "apex_lamb_step", _run(apex_lamb_step, make, dtype, **usual, **clip, **modes)
    yield "sgd_step", _sgd(make, dtype)
    yield (
        "mixed_step",
        _run(
            mixed_step,
            make,
            dtype,
            **_numbers({**HYPER, **INCOMING}),
            **{name: torch.tensor(value) for name, value in COUNTERS.items()},
            norm=torch.tensor(0.0),
            found_inf=torch.tensor(0.0),
            adam_w_mode=True,
            bias_correction=True,
            rule="dynamic",
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
        ),
    )


def _remainder(make: Maker, dtype: torch.dtype, **arguments: object) -> Sequence[object]:
    _, grads, first, second, _, steps = _state(make, dtype)
    halves = [make(COUNT, seed, BRAIN) for seed in (7, 8)]
    remainders = [halves[1].view(torch.int16)]
    step: Step = adamw_remainder_step
    return step([halves[0]], grads, first, second, remainders, steps, **arguments)


def _run(step: Step, make: Maker, dtype: torch.dtype, **arguments: object) -> Sequence[object]:
    return step(*_state(make, dtype), **arguments)


def _numbers(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: float64(value) for name, value in values.items()}


def _sgd(make: Maker, dtype: torch.dtype) -> Sequence[object]:
    p, g, b, _, copies, steps = _state(make, dtype)
    hyper = {"lr": 0.0123, "momentum": 0.87, "dampening": 0.3, "weight_decay": 0.07}
    factor, found_inf = torch.tensor(1 / 3), torch.tensor(0.0)
    flags = {"factor": factor, "found_inf": found_inf}
    return sgd_step(p, g, b, copies, steps, **_numbers(hyper), **flags, nesterov=True)


def _buffers(
    suffix: str, make: Maker, dtype: torch.dtype
) -> Iterator[tuple[str, Sequence[object]]]:
    g, zero = make(COUNT, 2, dtype), torch.tensor(0.0)
    third = torch.tensor(1 / 3)
    yield f"unscale {suffix}", unscale([g], inv_scale=third, found_inf=zero)
    norm, found_inf = global_norm([g], norm=zero, found_inf=zero)
    controls = {"scale": float64(3.0), "max_norm": float64(0.1)}
    yield f"global_norm {suffix}", (norm, found_inf)
    yield f"clip_factor {suffix}", clip_factor(norm=norm, factor=zero, **controls)
    yield f"accumulate {suffix}", accumulate([make(COUNT, 5, SINGLE), g], [g, g])
    yield f"cast_copy {suffix}", cast_copy([make(COUNT, 6, SINGLE)], [g])
    flat = torch.zeros(2 * COUNT + 40, dtype=dtype)
    yield f"flatten {suffix}", flatten([g, g[:3]], [flat], slot=16)


def drift(recorded: Digests) -> list[str]:
    """One sentence per case that differs from what was recorded; empty when none does."""
    now = computed()
    where = f"torch {recorded.torch} recorded it, this is torch {torch.__version__}"
    said = []
    for name in sorted(now.keys() | recorded.digests.keys()):
        if name not in now:
            said.append(f"{name} is recorded, but no longer computed")
        elif name not in recorded.digests:
            said.append(f"{name} is computed, but not recorded")
        elif now[name] != recorded.digests[name]:
            said.append(f"{name} has other bits than recorded: {where}")
    return said


def main(arguments: list[str]) -> int:
    """Compare with golden/digests.json, or write it; exit code 1 when something moved."""
    if arguments == ["--record"]:
        FILE.write_text(to_text(Digests(torch=torch.__version__, digests=computed())))
        print(f"{FILE.name}: recorded with torch {torch.__version__}")
        return 0
    if arguments:
        print("usage: python -m twinstep.parity.proof.gates.digests [--record]", file=sys.stderr)
        return 2
    moved = drift(read())
    print("\n".join(moved) if moved else "all digests are as recorded")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
