"""LAMB in CUDA C++: the equations, the launches and the bytes of `fast.kernels.lamb`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinstep.fast.kernels._lamb_sweeps import SPAN
from twinstep.fast.kernels._limbs import PADDED
from twinstep.fast.kernels.cuda.adam import prepared, types
from twinstep.fast.kernels.cuda.library import launch
from twinstep.fast.runtime.checks import require_step
from twinstep.fast.runtime.dispatch import cdiv
from twinstep.fast.runtime.tables import tensor_tables

THREADS = 256


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
    weight_decay: Tensor,
    max_coeff: Tensor,
    min_coeff: Tensor,
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
    eps_inside_sqrt: bool,
) -> None:
    """One step of LAMB; arguments and errors as in `fast.kernels.lamb`."""
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    controls |= {"max_coeff": max_coeff, "min_coeff": min_coeff}
    controls |= {"factor": factor, "found_inf": found_inf}
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    require_step("lamb_step_", lists, steps, controls)
    block = prepared("lamb", "lamb_prepare", THREADS, steps, controls, bias_correction)
    count = len(params)
    limbs = torch.zeros(count, 2, PADDED.value, dtype=torch.int64, device=block.device)
    inside = {"EPS_INSIDE": int(eps_inside_sqrt)}

    def run(
        kernel: str,
        programs: int,
        args: Sequence[Tensor | int],
        dtypes: Sequence[torch.dtype],
        roles: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        macros = types(dtypes, bool(copies)) | inside
        launch("lamb", kernel, programs, THREADS, block, args, macros, reaches=roles)

    read = [params, grads, exp_avgs, exp_avg_sqs]
    for table in tensor_tables(read, chunk=SPAN.value):
        args = (table.data, block, limbs, table.tensors)
        run("lamb_moments", table.chunks, args, table.dtypes, read)
    run("lamb_ratio", cdiv(count, THREADS), (block, limbs, count), (torch.float32,) * 2)
    written = [params, exp_avgs, exp_avg_sqs, *([copies] if copies else [])]
    for table in tensor_tables(written, chunk=SPAN.value):
        run("lamb_weights", table.chunks, (table.data, block, table.tensors), table.dtypes, written)
