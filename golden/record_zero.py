"""Make checkpoints with DeepSpeed's ZeRO, on one and on two processes.

    python -m twinstep.golden.record_zero [FOLDER]

A folder for each run: the shard of every rank after three steps, as DeepSpeed's engine names it,
and in `after.pt` weights, masters and scale of the same run after three more. The second step of
each three overflows. The mean of the ranks' gradients is the same for every number of ranks, and
every sum of them is exact, so that who reads the files can go on with any number.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinstep.golden.record_checkpoints import gradient, start
from twinstep.golden.record_deepspeed import deepspeed_version

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = Path(__file__).parent / "checkpoints" / "deepspeed_zero"
# By group: 14 elements, which two ranks cut within the second parameter, and one.
SIZES: tuple[tuple[tuple[int, ...], ...], ...] = (((2, 3), (3,), (5,)), ((1,),))
RATES = ((0.25, 0.125), (0.0625, 0.0))
SHARD = "{}zero_pp_rank_{}_mp_rank_00_optim_states.pt"
AFTER = "after.pt"
SAVED, ENDED = 3, 6
SCALING = {"init_scale": 16.0, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 2}
LIMIT = 1000.0  # no norm is as large: DeepSpeed's is a rounded one


@dataclass(frozen=True, kw_only=True)
class Made:
    """One run.

    Attributes:
        dtype: "fp16" or "bf16".
        stage: 1 or 2.
        elastic: saved so that DeepSpeed can load it on another number of ranks.
        world: number of ranks.
        dealt: parameters lie in round-robin order.
        aligned: parameters begin at multiples of 16 bytes.
    """

    dtype: str
    stage: int
    elastic: bool
    world: int
    dealt: bool = False
    aligned: bool = False

    @property
    def name(self) -> str:
        """Name of the folder."""
        kind = "elastic" if self.elastic else "rigid"
        order = "_dealt" * self.dealt + "_aligned" * self.aligned
        return f"{self.dtype}_stage{self.stage}_{kind}{order}_{self.world}"

    def shard(self, rank: int) -> str:
        """Name of a rank's file."""
        return SHARD.format("bf16_" if self.dtype == "bf16" else "", rank)


RUNS = {
    made.name: made
    for made in (
        *(
            Made(dtype=dtype, stage=stage, elastic=elastic, world=world)
            for dtype in ("fp16", "bf16")
            for stage in (1, 2)
            for elastic in (False, True)
            for world in (1, 2)
        ),
        Made(dtype="fp16", stage=2, elastic=False, world=2, dealt=True),
        Made(dtype="bf16", stage=2, elastic=True, world=2, dealt=True),
        Made(dtype="bf16", stage=1, elastic=True, world=2, dealt=True, aligned=True),
    )
}


def loss_of(params: Sequence[Tensor], step: int, rank: int, world: int) -> Tensor:
    """A loss whose gradients are given: one rank in turn has those of all."""
    import torch

    rows = []
    for place, param in enumerate(params):
        values = torch.tensor(gradient(step, place, param.numel())).view(param.shape)
        values = values * (world if rank == step % world else 0)
        if step % 3 == 1 and place == 0 and rank == step % world:
            values[-1, -1] = torch.inf
        rows.append((param.float() * values).sum())
    return torch.stack(rows).sum()


def groups_of(params: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """Parameter groups for an inner optimizer."""
    rest = list(params)
    return [
        {"params": [rest.pop(0) for _ in sizes], "lr": lr, "weight_decay": decay}
        for sizes, (lr, decay) in zip(SIZES, RATES, strict=True)
    ]


def weights_of(dtype: str) -> list[nn.Parameter]:
    """The parameters before the first step."""
    import torch

    kind: torch.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    shapes = [torch.Size(shape) for group in SIZES for shape in group]
    return [
        torch.nn.Parameter(torch.tensor(start(at, shape.numel()), dtype=kind).view(shape))
        for at, shape in enumerate(shapes)
    ]


def run(made: Made, folder: Path) -> None:
    """Train on this rank, save, go on, and write what the run ends in."""
    import torch

    params = weights_of(made.dtype)
    model = torch.nn.Module()
    for at, param in enumerate(params):
        model.register_parameter(f"p{at}", param)
    rank = torch.distributed.get_rank()
    inner = torch.optim.AdamW(groups_of(params))
    initialize = import_module("deepspeed").initialize
    engine, *_ = initialize(model=model, optimizer=inner, config=config_of(made))
    vars(model)["forward"] = lambda step: loss_of(params, step, rank, made.world)
    for step in range(ENDED):
        if step == SAVED:
            engine.save_checkpoint(str(folder), tag=made.name)
        engine.backward(engine(step))
        engine.step()
    zero: Any = engine.optimizer
    parts: list[list[Tensor]] = [[] for _ in range(made.world)]
    own = [part.detach() for part in zero.single_partition_of_fp32_groups]
    torch.distributed.all_gather_object(parts, own)
    if rank:
        return
    counters = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    after = {
        "weights": [param.detach().clone() for param in params],
        "masters": [torch.cat(whole) for whole in zip(*parts, strict=True)],
        "scale": {key: getattr(zero.loss_scaler, key, None) for key in counters},
        "norm": float(zero._global_grad_norm),
    }
    torch.save(after, folder / made.name / AFTER)


def config_of(made: Made) -> dict[str, object]:
    """DeepSpeed's configuration of a run."""
    zero = {
        "stage": made.stage,
        "elastic_checkpoint": made.elastic,
        "round_robin_gradients": made.dealt,
        "parameter_alignment": made.aligned,
    }
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1000, "hysteresis": 2}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "gradient_clipping": LIMIT,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        **({"bf16": {"enabled": True}} if made.dtype == "bf16" else {"fp16": fp16}),
    }


def record(folder: Path) -> list[Path]:
    """Run everything, each rank in a process of its own.

    Raises:
        CalledProcessError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for world in sorted({made.world for made in RUNS.values()}):
            _run_ranks(world, scratch)
        for name in RUNS:
            (folder / name).mkdir(parents=True, exist_ok=True)
            # The model's own file and the recovery script are the engine's business.
            for file in [
                *Path(scratch, name).glob("*_optim_states.pt"),
                Path(scratch, name, AFTER),
            ]:
                shutil.copyfile(file, folder / name / file.name)
    return [folder / name for name in RUNS]


def _run_ranks(world: int, scratch: str) -> None:
    """Run everything that is for a number of ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "twinstep.golden.record_zero", scratch, str(world)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": number, "LOCAL_RANK": number})
        for number in map(str, range(world))
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise subprocess.CalledProcessError(max(codes), command)


def _be_rank(folder: Path, world: int) -> None:
    """Run everything that is for a number of ranks, as one of them."""
    deepspeed = import_module("deepspeed")
    # Its collective over shared memory would be compiled first; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It refuses fp16 on a CPU, where it computes all the same.
    vars(deepspeed.accelerator.get_accelerator())["is_fp16_supported"] = lambda: True
    deepspeed_version()
    for made in RUNS.values():
        if made.world == world:
            run(made, folder)


def main(arguments: list[str]) -> int:
    """Write everything, or be one rank; exit code 2 when DeepSpeed is missing."""
    folder = Path(arguments[0]) if arguments else FOLDER
    if len(arguments) > 1:
        _be_rank(folder, int(arguments[1]))
        return 0
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed should be installed to be recorded, but is not", file=sys.stderr)
        return 2
    print("\n".join(map(str, record(folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
