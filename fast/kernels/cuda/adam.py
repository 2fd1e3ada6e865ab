"""Adam (L2) and AdamW (decoupled), with an optional low-precision copy, in CUDA C++.

The arithmetic, the pointer tables and the coefficient block of `fast.kernels.adam`; two launches,
28 bytes per parameter for fp32 state, a 16-bit gradient and a 16-bit copy.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinstep.fast.kernels._arith import HEADER
from twinstep.fast.kernels._layout import CHUNK
from twinstep.fast.kernels.cuda.library import NUMBERS, launch
from twinstep.fast.runtime.checks import Lists, require_step
from twinstep.fast.runtime.dispatch import cdiv
from twinstep.fast.runtime.tables import address_table, tensor_tables

THREADS = 128


def adam_step_(
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
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """Adam with L2 weight decay; arguments and errors as in `fast.kernels.adam`."""
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    _step("adam_step_", lists, steps, controls, bias_correction, decoupled=False)


def adamw_step_(
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
    factor: Tensor,
    found_inf: Tensor,
    bias_correction: bool,
) -> None:
    """AdamW: the decay acts on the weights alone. Arguments and errors as in `adam_step_`."""
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    lists |= {"exp_avg_sqs": exp_avg_sqs, "copies": copies}
    controls = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    controls |= {"weight_decay": weight_decay, "factor": factor, "found_inf": found_inf}
    _step("adamw_step_", lists, steps, controls, bias_correction, decoupled=True)


def _step(
    where: str,
    lists: Lists,
    steps: Sequence[Tensor],
    controls: Mapping[str, Tensor],
    bias_correction: bool,
    *,
    decoupled: bool,
) -> None:
    require_step(where, lists, steps, controls)
    update_adam(lists, steps, controls, bias_correction, decoupled=decoupled)


def update_adam(
    lists: Lists,
    steps: Sequence[Tensor],
    controls: Mapping[str, Tensor],
    bias_correction: bool,
    *,
    decoupled: bool,
) -> None:
    """Advance the counters and update every tensor.

    Args:
        lists: params, grads, exp_avgs, exp_avg_sqs, and copies or remainders, which may be empty.
        steps: completed steps.
        controls: in the order of the operation.
        bias_correction: False uses 1 for both corrections.
        decoupled: AdamW, not Adam.
    """
    block = prepared("adam", "adam_prepare", THREADS, steps, controls, bias_correction)
    *required, copies = lists.values()
    roles = [*required, *([copies] if copies else [])]
    for table in tensor_tables(roles, chunk=CHUNK.value):
        args = (table.data, block, table.tensors)
        macros = types(table.dtypes, bool(copies)) | {"DECOUPLED": int(decoupled)}
        launch("adam", "adam_update", table.chunks, THREADS, block, args, macros, reaches=roles)


def prepared(
    source: str,
    kernel: str,
    threads: int,
    steps: Sequence[Tensor],
    controls: Mapping[str, Tensor],
    bias_correction: bool,
) -> Tensor:
    """Advance the step counters and return the coefficient block of this step."""
    near = controls["found_inf"]
    block = torch.empty(HEADER.value + 2 * len(steps), dtype=torch.float32, device=near.device)
    # Without a tensor the header is written all the same; the table then holds an address of none.
    table = address_table(steps if steps else [near]).data
    numbers = (len(steps), int(bias_correction))
    args: list[Tensor | int] = [table, block, *controls.values(), *numbers]
    programs = max(1, cdiv(len(steps), threads))
    macros = types((torch.float32,) * 2, False) | {"DECOUPLED": 0, "EPS_INSIDE": 0}
    launch(source, kernel, programs, threads, near, args, macros, reaches=[steps])
    return block


def types(dtypes: Sequence[torch.dtype], has_copy: bool) -> dict[str, int]:
    """Macros for the dtypes of weights, gradients and copies."""
    params, grads, copies = dtypes[0], dtypes[1], dtypes[-1] if has_copy else torch.float32
    macros = {"P": NUMBERS[params], "G": NUMBERS[grads], "C": NUMBERS[copies]}
    return macros | {"HAS_COPY": int(has_copy)}
