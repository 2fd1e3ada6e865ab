"""Part: the update and the reduce kernel against a copy that moves as many bytes.

The copy is measured in the same run, turn by turn with the kernels, so that clocks and temperature
are the same for both. What counts is the median of the ratios of neighbouring measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from twinstep.benchmarks.part import Figures
from twinstep.benchmarks.state import REDUCE_BYTES, UPDATE_BYTES, controls, new_state
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.kernels.reduce import new_limbs, reduce_gradients

NUMEL = 2**26
ROUNDS = 41
WARM_UP = 5
Work = Callable[[], object]


def run() -> Figures:
    """Time both kernels on the current GPU."""
    device = torch.device("cuda")
    update = update_work(NUMEL, device)
    reduce = reduce_work(4 * NUMEL, device)
    return {
        "update": measure(update, UPDATE_BYTES * NUMEL, device) | {"numel": NUMEL},
        "reduce": measure(reduce, REDUCE_BYTES * 4 * NUMEL, device) | {"numel": 4 * NUMEL},
    }


def update_work(numel: int, device: torch.device) -> Work:
    """AdamW over a flat buffer with bf16 gradients and copies; the update launch alone."""
    state, given = new_state([numel], device), controls(device)
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "factor", "found_inf")
    ordered = tuple(given[name] for name in names)
    coefficients = prepare_adam(state.lists[5], ordered, bias_correction=True)
    return lambda: update_adam(state.lists[:5], coefficients, decoupled=True)


def reduce_work(numel: int, device: torch.device) -> Work:
    """The exact sum of squares of one flat bf16 buffer; the reduce launch alone."""
    grads = torch.empty(numel, dtype=torch.bfloat16, device=device).normal_()
    limbs = new_limbs(device)
    return lambda: reduce_gradients([grads], limbs)


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
        "ratio_to_copy": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "work_ms": round(statistics.median(work_ms), 4),
        "copy_ms": round(statistics.median(copy_ms), 4),
        "bytes": moved,
        "work_gb_per_s": round(moved / statistics.median(work_ms) / 1e6, 1),
        "rounds": len(ratios),
    }
