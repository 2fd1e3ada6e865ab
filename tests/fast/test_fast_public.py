"""The public names of fast, and DeepSpeed's signatures in front of them."""

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import twinstep.fast.deepspeed
import twinstep.fast.public

HALF, BRAIN = torch.float16, torch.bfloat16


def test_every_public_name_is_there_and_nothing_else_is() -> None:
    for name in twinstep.fast.__all__:
        assert getattr(twinstep.fast, name) is getattr(twinstep.fast.public, name)
    assert {name for name in vars(twinstep.fast.public) if not name.startswith("_")} == set(
        twinstep.fast.__all__
    )
    with pytest.raises(AttributeError, match="module 'twinstep.fast' has no attribute 'Adam'"):
        _ = twinstep.fast.Adam


def test_importing_fast_loads_neither_triton_nor_torch() -> None:
    said = "import twinstep.fast, sys; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype))]


def test_positional_arguments_lie_where_deepspeed_has_them() -> None:
    group = twinstep.fast.deepspeed.FusedAdam(
        weights(HALF), 0.1, False, (0.5, 0.6), 1e-3, False, 0.2
    )
    adam = group.param_groups[0]
    assert (adam["lr"], adam["bias_correction"], adam["betas"]) == (0.1, False, (0.5, 0.6))
    assert (adam["eps"], adam["weight_decay"], group.adam_w_mode) == (1e-3, 0.2, False)
    lamb = twinstep.fast.deepspeed.FusedLamb(
        weights(HALF), 0.1, True, (0.9, 0.99), 1e-6, True, 0.1, 2.0
    )
    assert lamb.eps_inside_sqrt
    assert lamb.param_groups[0]["max_grad_norm"] == 2.0
    flat = twinstep.fast.deepspeed.FP16_Optimizer(
        group, None, None, HALF, 8.0, False, 2.0**16, None, False
    )
    assert (flat.loss_scale, flat.verbose) == (8.0, False)
    unfused = twinstep.fast.deepspeed.FP16_UnfusedOptimizer(
        lamb, None, None, HALF, 1.0, True, {"init_scale": 4, "scale_window": 3, "min_scale": 1}
    )
    assert unfused.loss_scale == 4.0
    params = weights(BRAIN)
    config: Any = SimpleNamespace(immediate_grad_update=True)
    names = {params[0]: "w"}
    brain = twinstep.fast.deepspeed.BF16_Optimizer(
        twinstep.fast.FusedAdam(params), names, config, None, 0.5, 1, 7
    )
    assert (brain.clip_grad, brain.norm_type, brain.immediate_grad_update) == (0.5, 1.0, True)
    assert brain.allgather_bucket_size == 7
    params = weights(BRAIN)
    zero = twinstep.fast.deepspeed.DeepSpeedZeroOptimizer(
        twinstep.fast.FusedAdam(params), {params[0]: "w"}, None, None, 1.0, False, None, False,
        True, 9, True, 8, None, None, None, True, False, None, None, None, 0.5, HALF, BRAIN,
    )  # fmt: skip
    assert (zero.options.reduce_bucket_size, zero.options.allgather_bucket_size) == (9, 8)
    assert (zero.clip_grad, zero.options.gradient_accumulation_dtype) == (0.5, HALF)
    assert zero.options.communication_data_type == BRAIN


OURS = ["FP16_Optimizer", "FP16_UnfusedOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer"]


@pytest.mark.parametrize("ours", OURS)
def test_further_arguments_are_keywords(ours: str) -> None:
    kinds = inspect.signature(getattr(twinstep.fast.deepspeed, ours)).parameters
    assert kinds["compat"].kind is inspect.Parameter.KEYWORD_ONLY


def test_helpers_of_deepspeeds_zero_do_what_they_are_named_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = twinstep.fast.deepspeed
    one, two = torch.ones(3, dtype=BRAIN), torch.ones(4)
    kept = theirs.split_half_float_double([one, two, one, two.to_sparse(), torch.ones(1).int()])
    assert [[id(tensor) for tensor in row] for row in kept] == [[id(two)], [id(one), id(one)]]
    assert [theirs.get_alignment_padding([one, two], by) for by in (7, 8, 4)] == [0, 1, 1]
    assert theirs.lcm(4, 6) == 12
    assert theirs.isclose(1.0, 1.0 + 1e-10)
    assert not theirs.isclose(1.0, 1.0 + 1e-8)
    theirs.print_rank_msg("ready")
    assert capsys.readouterr().out == "rank 0 - ready\n"


def test_a_scaler_is_made_for_a_dtype() -> None:
    make = twinstep.fast.deepspeed.CreateLossScaler
    assert [make(dtype, 8.0, False, None).loss_scale for dtype in (HALF, BRAIN)] == [8.0, 1.0]
    moving = make(HALF, 8.0, True, {"init_scale": 64.0, "scale_window": 5})
    assert (moving.dynamic, moving.loss_scale) == (True, 64.0)
    assert not make(BRAIN, 8.0, True, {"init_scale": 64.0}).dynamic
    with pytest.raises(ValueError, match="dynamic_loss_args=None, but should be a dict"):
        make(HALF, 8.0, True, None)
