"""Predictions of `gpu-check` that follow from the model of time, put beside those that do not.

    python -m twinstep.benchmarks.predicted     # renews benchmarks/results/gpu-check.json

A kernel with counts of its machine code is predicted to reach ATTAINED of what the lowest bound of
its main loop on DEVICE allows. What has no counts (torch's kernels, small passes, whole steps) is
written by hand in the same file. None of it is a measurement.
"""

from __future__ import annotations

import json
import sys
from typing import cast

from twinstep.benchmarks.gpu_check import PREDICTED
from twinstep.benchmarks.part import Figures
from twinstep.parity.proof.gates.compile import model
from twinstep.parity.proof.gates.compile.ceilings import load

DEVICE = "H100"
ATTAINED = 0.93  # of a copy that is timed beside it: a launch has a beginning and an end
ADAM = "adam_flat_kernel param=fp32 grads=fp32 exp_avgs=fp32 exp_avg_sqs=fp32 copies=bf16 DECOUPLED"
# Figure of the part `timing` -> kernels in the model, one after the other. For AdamW over a flat
# buffer, and for LAMB, whose gradients and copies are bf16, a neighbour in fp32 stands.
KERNELS = {
    "update": (f"{ADAM} HAS_COPY",),
    "update of a list": ("adam_list_kernel P=fp32 G=bf16 M=fp32 C=bf16 DECOUPLED HAS_COPY",),
    "reduce bf16": ("reduce_flat_kernel grads=bf16 limbs=i64 KIND=2",),
    "reduce bf16 of a list": ("reduce_list_kernel table=i64 limbs=i64 G=bf16 KIND=2",),
    "reduce fp16": ("reduce_flat_kernel grads=fp16 limbs=i64 KIND=2",),
    "reduce fp32": ("reduce_flat_kernel grads=fp32 limbs=i64 KIND=2",),
    "update in CUDA C++": ("cuda.adam_update C=bf16 DECOUPLED G=bf16 HAS_COPY P=fp32",),
    "reduce bf16 in CUDA C++": ("cuda.reduce_squares G=bf16",),
    "reduce fp32 in CUDA C++": ("cuda.reduce_squares G=fp32",),
    "lamb of a list": (
        "lamb_moments_kernel limbs=i64 P=fp32 G=fp32 M=fp32",
        "lamb_weights_kernel P=fp32 M=fp32 C=fp32",
    ),
}


def fractions() -> dict[str, float]:
    """Fraction of the copy rate that each of these kernels is predicted to reach."""
    recorded, device = load().facts, model.DEVICES[DEVICE]
    kernels = {kernel.variant: kernel for kernel in model.KERNELS}
    found = {}
    for name, variants in KERNELS.items():
        moved, taken = 0, 0.0  # taken: bytes that a copy would move in the same time
        for variant in variants:
            bounds = model.bounds(kernels[variant], device, recorded[variant, device.target])
            moved += kernels[variant].moved
            taken += kernels[variant].moved / min(1.0, *bounds.values())
        found[name] = round(ATTAINED * moved / taken, 2)
    return found


def renewed(document: Figures) -> Figures:
    """The file of predictions with those of the model as they should be."""
    for part in cast("list[Figures]", document["parts"]):
        if part["name"] == "timing":
            predicted = cast("dict[str, dict[str, dict[str, float]]]", part["predicted"])
            for name, fraction in fractions().items():
                predicted["figures"][name]["of_the_copy_rate"] = fraction
    return document


def main() -> int:
    """Renew the file."""
    document = renewed(json.loads(PREDICTED.read_text()))
    PREDICTED.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
