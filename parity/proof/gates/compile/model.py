"""A model of time: what bounds a kernel's main loop on a device, from counts of its machine code.

Rates are a multiprocessor's, by class of instruction (`main_loop`), per clock and lane. They are
published or assumed, and so is 80 % of the issue rate; nothing here is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from twinstep.fast.kernels.reduce import RESIDENT
from twinstep.parity.proof.gates.compile.artefacts import Facts
from twinstep.parity.proof.gates.compile.cuda import PREFIX, applies

ISSUED = 0.8  # of the issue slots, at best
LATENCY = 800  # clocks from a load to its data, under load
REGISTERS = 65536  # of a multiprocessor
THREADS = 2048  # of a multiprocessor
NOT_MEASURED = "not yet measured"
HEAD = (
    "kernel",
    "device",
    "instructions",
    "issue",
    "pipes",
    "latency",
    "bound",
    "of copy",
    "measured",
)


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        target: what its kernels are compiled for.
        units: multiprocessors.
        clock: Hz under load.
        copy: bytes per second of a copy, read and written.
        lanes: instructions of a lane that a multiprocessor issues in a clock.
        rates: class of instruction -> lanes in a clock, where that is less.
        warp: lanes of a warp.
    """

    target: str
    units: int
    clock: float
    copy: float
    lanes: int
    rates: Mapping[str, float]
    warp: int = 32


_NVIDIA = {"integer": 64, "wide": 32, "special": 16, "memory": 32, "shared": 32}
DEVICES = {
    "H100": Device("sm_90", 132, 1.755e9, 3.0e12, 128, {**_NVIDIA, "float64": 64}),
    "H200": Device("sm_90", 132, 1.755e9, 4.3e12, 128, {**_NVIDIA, "float64": 64}),
    "B200": Device("sm_100", 148, 1.85e9, 7.0e12, 128, {**_NVIDIA, "float64": 64}),
    "B300": Device("sm_100", 148, 1.85e9, 7.2e12, 128, {**_NVIDIA, "float64": 2}),
    "MI300X": Device(
        "gfx942", 304, 2.1e9, 4.2e12, 64, {"wide": 16, "special": 16, "float64": 64}, 64
    ),
}


@dataclass(frozen=True)
class Kernel:
    """A variant in the model.

    Attributes:
        variant: its name among the ceilings.
        dtype: of its gradients.
        moved: bytes that an element moves, read and written.
        loaded: of these, bytes that the main loop's wide loads read.
        warps: of a program.
        most: programs that a multiprocessor is given at most.
    """

    variant: str
    dtype: str
    moved: int
    loaded: int
    warps: int
    most: int = RESIDENT


KERNELS = (
    Kernel("reduce_flat_kernel grads=bf16 limbs=i64 KIND=2", "bf16", 2, 2, 8),
    Kernel("reduce_list_kernel table=i64 limbs=i64 G=bf16 KIND=2", "bf16", 2, 2, 8),
    Kernel("reduce_flat_kernel grads=fp16 limbs=i64 KIND=2", "fp16", 2, 2, 8),
    Kernel("reduce_list_kernel table=i64 limbs=i64 G=fp16 KIND=2", "fp16", 2, 2, 8),
    Kernel("reduce_flat_kernel grads=fp32 limbs=i64 KIND=2", "fp32", 4, 4, 8),
    Kernel("reduce_list_kernel table=i64 limbs=i64 G=fp32 KIND=2", "fp32", 4, 4, 8),
    Kernel("cuda.reduce_squares G=bf16", "bf16", 2, 2, 8, THREADS // 256),
    Kernel("cuda.reduce_squares G=fp16", "fp16", 2, 2, 8, THREADS // 256),
    Kernel("cuda.reduce_squares G=fp32", "fp32", 4, 4, 8, THREADS // 256),
    Kernel(
        "cuda.adam_update C=bf16 DECOUPLED G=bf16 HAS_COPY P=fp32",
        "bf16",
        28,
        14,
        4,
        THREADS // 128,
    ),
    Kernel(
        "adam_flat_kernel param=fp32 grads=fp32 exp_avgs=fp32 exp_avg_sqs=fp32 copies=bf16 "
        "DECOUPLED HAS_COPY",
        "fp32",
        30,
        16,
        4,
        THREADS // 128,
    ),
    Kernel(
        "adam_list_kernel P=fp32 G=bf16 M=fp32 C=bf16 DECOUPLED HAS_COPY",
        "bf16",
        28,
        14,
        4,
        THREADS // 128,
    ),
    Kernel("lamb_moments_kernel limbs=i64 P=fp32 G=fp32 M=fp32", "fp32", 24, 16, 8, THREADS // 256),
    Kernel(
        "apex_lamb_moments_kernel limbs=i64 P=fp32 G=fp32 M=fp32 ADAM_W",
        "fp32",
        24,
        16,
        4,
        THREADS // 128,
    ),
    Kernel("lamb_weights_kernel P=fp32 M=fp32 C=fp32", "fp32", 16, 12, 4, THREADS // 128),
    Kernel(
        "apex_lamb_weights_kernel P=fp32 M=fp32 C=fp32 ADAM_W", "fp32", 16, 12, 4, THREADS // 128
    ),
    Kernel("cuda.lamb_moments C=fp32 G=fp32 P=fp32", "fp32", 24, 16, 8, THREADS // 256),
    Kernel("cuda.lamb_weights C=fp32 G=fp32 P=fp32", "fp32", 16, 12, 8, THREADS // 256),
)


def resident(registers: int, warps: int, warp: int = 32) -> int:
    """Programs that a multiprocessor's registers hold at once.

    >>> resident(80, 8)
    3
    """
    return REGISTERS // (-(-registers // 8) * 8 * warp * warps)


def bounds(kernel: Kernel, device: Device, facts: Facts) -> dict[str, float]:
    """Fraction of the copy rate that each resource allows: issue, one for each class, latency."""
    elements = facts["loop_bytes"] / kernel.loaded
    # Elements that a multiprocessor has to take in a clock to keep up with a copy.
    needed = device.copy / (kernel.moved * device.units * device.clock)
    found = {"issue": device.lanes * ISSUED / (facts["loop"] / elements) / needed}
    for kind, rate in device.rates.items():
        if facts.get(f"loop_{kind}"):
            found[kind] = rate / (facts[f"loop_{kind}"] / elements) / needed
    programs = min(resident(facts["registers"], kernel.warps, device.warp), kernel.most)
    turn = LATENCY + facts["loop"]
    flying = programs * kernel.warps * device.warp * elements
    found["latency"] = flying / turn / needed
    return found


def rows(recorded: Mapping[tuple[str, str], Facts]) -> Iterator[tuple[str, ...]]:
    """One row for each kernel and device it is counted for: counts, bounds, the lowest of them."""
    for kernel in KERNELS:
        for name, device in DEVICES.items():
            if kernel.variant.startswith(PREFIX) and not applies(device.target):
                continue
            facts = recorded[kernel.variant, device.target]
            if "loop" not in facts:  # AMD assembly with a masked way in the loop is not counted
                continue
            found = bounds(kernel, device, facts)
            pipe = min((k for k in found if k not in ("issue", "latency")), key=found.__getitem__)
            low = min(found, key=found.__getitem__)
            yield (
                kernel.variant.partition(" ")[0].removesuffix("_kernel") + " " + kernel.dtype,
                name,
                f"{facts['loop'] * kernel.loaded / facts['loop_bytes']:.1f}",
                f"{found['issue']:.2f}",
                f"{found[pipe]:.2f} {pipe}",
                f"{found['latency']:.2f}",
                low if found[low] < 1 else "memory",
                f"{min(1.0, found[low]):.2f}",
                NOT_MEASURED,
            )


def table(recorded: Mapping[tuple[str, str], Facts]) -> str:
    """The model as Markdown."""
    ruler = "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | --- |"
    lines = [f"| {' | '.join(row)} |" for row in rows(recorded)]
    return "\n".join([f"| {' | '.join(HEAD)} |", ruler, *lines]) + "\n"
