"""Part: kernels against a copy that moves as many bytes, then whole steps beside peers.

The copy is measured in the same run, turn by turn with the kernels, so that clocks and temperature
are the same for both. What counts is the median of the ratios of neighbouring measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from twinstep.benchmarks import offload, steps
from twinstep.benchmarks.part import Figures
from twinstep.benchmarks.state import UPDATE_BYTES, apply, controls, new_state
from twinstep.fast.kernels.accumulate import accumulate_
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.kernels.cuda import adam
from twinstep.fast.kernels.cuda.reduce import add_squares
from twinstep.fast.kernels.lamb import lamb_step_
from twinstep.fast.kernels.reduce import new_limbs, reduce_gradients
from twinstep.fast.kernels.unscale import unscale_

NUMEL = 2**26
TENSORS = 200
ROUNDS = 41
WARM_UP = 5
CPU_NUMEL, CPU_ROUNDS = 2**24, 5
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Work = Callable[[], object]
Device = torch.device


def run() -> Iterator[Figures]:
    """Time kernels and whole steps on the current GPU, and the kernels of its host."""
    device = torch.device("cuda")
    for timed in KERNELS:
        numel = NUMEL * timed.times
        work = timed.work(numel, device)
        try:
            work()
        except RuntimeError as error:
            if "NVRTC" not in str(error) and "nvrtc" not in str(error):
                raise
            yield {timed.name: {"absent": str(error)}}
        else:
            figures = measure(work, timed.bytes * numel, device)
            yield {timed.name: figures | {"numel": numel}}
    for name, figures in steps.measured(device):
        yield {name: figures}
    yield {"cpu": offload.run(CPU_NUMEL, CPU_ROUNDS)}


@dataclass(frozen=True)
class Timed:
    """A launch, or what comes in its place elsewhere.

    Attributes:
        name: of the figure.
        bytes: read and written for each element, at least.
        work: makes the tensors, and returns what is timed.
        times: NUMEL, for what moves few bytes.
    """

    name: str
    bytes: int
    work: Callable[[int, Device], Work]
    times: int = 1


def sizes_of(numel: int, tensors: int) -> list[int]:
    """Sizes of tensors with so many elements in all."""
    each = -(-numel // tensors)
    return [min(each, numel - first) for first in range(0, numel, each)]


def update_work(numel: int, device: Device, tensors: int = 1) -> Work:
    """AdamW with bf16 gradients and copies over a flat buffer or a list; the update alone."""
    state, given = new_state(sizes_of(numel, tensors), device), controls(device)
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "factor", "found_inf")
    ordered = tuple(given[name] for name in names)
    coefficients = prepare_adam(state.lists[5], ordered, bias_correction=True)
    return lambda: update_adam(state.lists[:5], coefficients, decoupled=True)


def reduce_work(numel: int, device: Device, dtype: torch.dtype = BRAIN, tensors: int = 1) -> Work:
    """The exact sum of squares; the reduce launch alone."""
    grads, limbs = drawn(numel, device, dtype, tensors), new_limbs(device)
    return lambda: reduce_gradients(grads, limbs)


def update_in_cuda(numel: int, device: Device) -> Work:
    """The same update by the kernel in CUDA C++, with its own small launch before it."""
    state, given = new_state([numel], device), controls(device)
    return lambda: apply(adam.adamw_step_, state, given, bias_correction=True)


def reduce_in_cuda(numel: int, device: Device, dtype: torch.dtype = BRAIN) -> Work:
    """The exact sum of squares by the kernel in CUDA C++."""
    grads, limbs = drawn(numel, device, dtype), new_limbs(device)
    return lambda: add_squares(grads, limbs)


def lamb_work(numel: int, device: Device) -> Work:
    """LAMB with bf16 gradients and copies over a list: all launches of the update."""
    state, given = new_state(sizes_of(numel, TENSORS), device), controls(device)
    for name, value in (("max_coeff", 10.0), ("min_coeff", 0.01)):
        given[name] = torch.tensor(value, dtype=torch.float64).to(device)
    return lambda: apply(lamb_step_, state, given, bias_correction=True, eps_inside_sqrt=False)


def accumulate_work(numel: int, device: Device) -> Work:
    """bf16 gradients added to fp32 sums."""
    lists = drawn(numel, device, FULL), drawn(numel, device, BRAIN)
    return lambda: accumulate_(*lists)


def cast_work(numel: int, device: Device) -> Work:
    """fp32 weights copied to bf16."""
    lists = drawn(numel, device, FULL), drawn(numel, device, BRAIN)
    return lambda: cast_copy_(*lists)


def unscale_work(numel: int, device: Device) -> Work:
    """fp16 gradients unscaled in place; by 1, so that they stay as they are."""
    grads = drawn(numel, device, HALF)
    inv_scale, found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    return lambda: unscale_(grads, inv_scale=inv_scale, found_inf=found_inf)


def foreach_norm_work(numel: int, device: Device) -> Work:
    """Norms by torch of each tensor of a list, the first half of `clip_grad_norm_`."""
    grads = drawn(numel, device, BRAIN, TENSORS)
    return lambda: torch._foreach_norm(grads, 2.0)


def drawn(numel: int, device: Device, dtype: torch.dtype, tensors: int = 1) -> list[torch.Tensor]:
    """Normal values in one tensor or several."""
    sizes = sizes_of(numel, tensors)
    return [torch.empty(size, dtype=dtype, device=device).normal_() for size in sizes]


KERNELS: list[Timed] = [
    Timed("update", UPDATE_BYTES, update_work),
    Timed("update of a list", UPDATE_BYTES, partial(update_work, tensors=TENSORS)),
    Timed("reduce bf16", 2, reduce_work, times=4),
    Timed("reduce bf16 of a list", 2, partial(reduce_work, tensors=TENSORS), times=4),
    Timed("reduce fp16", 2, partial(reduce_work, dtype=HALF), times=4),
    Timed("reduce fp32", 4, partial(reduce_work, dtype=FULL), times=4),
    Timed("update in CUDA C++", UPDATE_BYTES, update_in_cuda),
    Timed("reduce bf16 in CUDA C++", 2, reduce_in_cuda, times=4),
    Timed("reduce fp32 in CUDA C++", 4, partial(reduce_in_cuda, dtype=FULL), times=4),
    Timed("torch's norms bf16", 2, foreach_norm_work, times=4),
    Timed("lamb of a list", 40, lamb_work),
    Timed("accumulate", 10, accumulate_work, times=2),
    Timed("cast", 6, cast_work, times=4),
    Timed("unscale fp16", 4, unscale_work, times=4),
]


def measure(work: Work, moved: int, device: torch.device) -> Figures:
    """Time some work, which moves `moved` bytes, turn by turn with a copy of half as many.

    A copy reads and writes every byte, so that both move the same.
    """
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    work_ms, copy_ms = [], []

    def copy() -> object:
        return target.copy_(source)

    for _ in range(WARM_UP + ROUNDS):
        work_ms.append(milliseconds(work, ahead=copy))
        copy_ms.append(milliseconds(copy, ahead=copy))
    return summary(work_ms[WARM_UP:], copy_ms[WARM_UP:], moved)


def milliseconds(work: Work, ahead: Work) -> float:
    """GPU time between two events around some work.

    `ahead` is queued first and keeps the GPU busy while the host prepares the launch; otherwise the
    time between the events would hold that preparation too.
    """
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ahead()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def summary(work_ms: list[float], copy_ms: list[float], moved: int) -> Figures:
    """Medians, and the quartiles of the ratios of neighbours."""
    ratios = [work / copy for work, copy in zip(work_ms, copy_ms, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "of_the_copy_rate": round(1 / middle, 4),
        "of_the_copy_rate_quartiles": [round(1 / high, 4), round(1 / low, 4)],
        "work_ms": round(statistics.median(work_ms), 4),
        "copy_ms": round(statistics.median(copy_ms), 4),
        "bytes": moved,
        "work_gb_per_s": round(moved / statistics.median(work_ms) / 1e6, 1),
        "rounds": len(ratios),
    }
