"""Record ZeRO of DeepSpeed's engine: stages 1 and 2, fp16 and bf16, on one and two processes.

    python -m twinstep.golden.record_engine FILE RANKS

is one rank of all runs that have so many: it is started by `record` and leaves in FILE what the
first rank saw. Ranks whose scale, norm or weights differ are an error.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinstep.golden.drive import Driven, Groups, drive
from twinstep.golden.record_deepspeed import deepspeed_version, header_of
from twinstep.golden.record_runs import inner_of
from twinstep.golden.runs import RUNS
from twinstep.golden.sequences import Situation
from twinstep.golden.trace import Step, Trace, Value, from_text, to_text

if TYPE_CHECKING:
    from torch import Tensor, nn

SUBJECT = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"


def record(situations: Sequence[Situation]) -> list[Trace]:
    """Run every situation, each rank in a process of its own.

    Raises:
        CalledProcessError: a rank failed.
    """
    import_module("deepspeed")
    found: list[Trace] = []
    with tempfile.TemporaryDirectory() as scratch:
        for world in sorted({ranks_of(situation) for situation in situations}):
            file = Path(scratch, f"{world}.json")
            _run_ranks(world, file)
            found += [from_text(text, file.name) for text in json.loads(file.read_text())]
    return found


def ranks_of(situation: Situation) -> int:
    """Number of ranks of a run."""
    return int(situation.constants["ranks"])


def _run_ranks(world: int, file: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "twinstep.golden.record_engine", str(file), str(world)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **where, "RANK": number, "LOCAL_RANK": number},
            stdout=subprocess.DEVNULL,
        )
        for number in map(str, range(world))
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise subprocess.CalledProcessError(max(codes), command)


def _run(situation: Situation) -> Trace:
    import torch

    given = situation.constants
    rank = torch.distributed.get_rank()
    dtype = torch.bfloat16 if given["bf16"] else torch.float16
    make = partial(_engine, situation)
    ranks = ranks_of(situation)
    rows = drive(situation.steps, given, dtype, make, rank=rank, ranks=ranks)
    everybody: list[list[Step]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(everybody, rows)
    if any(seen != everybody[0] for seen in everybody):
        raise RuntimeError(f"{situation.name}: ranks saw different runs: {everybody}")
    header = header_of(situation, deepspeed_version(), SUBJECT, {"scale": situation.scale})
    return Trace(header=header, steps=rows)


def _engine(
    situation: Situation, params: list[nn.Parameter], groups: Groups, saved: object
) -> Driven:
    import torch

    del saved
    given = situation.constants

    class Losses(torch.nn.Module):
        """A model whose forward pass gives the loss that it is handed."""

        def __init__(self) -> None:
            super().__init__()
            self.params = torch.nn.ParameterList(params)

        def forward(self, loss: Tensor) -> Tensor:
            return loss

    sizes = [len(params[0]) + len(params[1])] if len(groups) == 1 else [len(p) for p in params]
    initialize = import_module("deepspeed").initialize
    engine, *_ = initialize(
        model=Losses(), optimizer=inner_of(situation, groups), config=_config(situation)
    )
    zero: Any = engine.optimizer
    micro_batches = int(given["micro_batches"])
    counters = ("cur_iter", "last_overflow_iter", "cur_hysteresis")

    def backward(loss: Tensor) -> None:
        # The engine divides, too.
        engine.backward(engine(loss * micro_batches))
        if not engine.is_gradient_accumulation_boundary():
            # It counts micro-batches there.
            engine.step()

    def masters() -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in range(ranks_of(situation))]
        own = [part.detach() for part in zero.single_partition_of_fp32_groups]
        torch.distributed.all_gather_object(parts, own)
        whole = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        return [flat[:size] for flat, size in zip(whole, sizes, strict=True)]

    def observe() -> dict[str, Value]:
        skipped = bool(zero.overflow)
        counted = {} if given["bf16"] else {n: int(getattr(zero.loss_scaler, n)) for n in counters}
        norm = 0.0 if skipped else float(zero._global_grad_norm)
        return {"scale": float(zero.loss_scale), **counted, "norm": norm, "skipped": skipped}

    return Driven(
        backward=backward,
        step=engine.step,
        observe=observe,
        masters=masters,
        groups=lambda: zero.param_groups,
    )


def _config(situation: Situation) -> dict[str, object]:
    given = situation.constants
    fp16 = {
        "enabled": True,
        "initial_scale_power": 4,
        "loss_scale_window": given["scale_window"],
        "hysteresis": given["delayed_shift"],
        "min_loss_scale": given["min_scale"],
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": given["micro_batches"],
        "gradient_clipping": given["clip_grad"],
        "zero_optimization": {"stage": given["stage"]},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
        **(
            {"bf16": {"enabled": True, "check_grad_overflow": True}}
            if given["bf16"]
            else {"fp16": fp16}
        ),
    }


def _be_rank(file: Path, world: int) -> None:
    deepspeed = import_module("deepspeed")
    # Its collective over shared memory would be compiled first; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It refuses fp16 on a CPU, where it computes all the same.
    vars(deepspeed.accelerator.get_accelerator())["is_fp16_supported"] = lambda: True
    deepspeed_version()
    chosen = [run for run in RUNS if run.rule == "zero" and ranks_of(run) == world]
    texts = [to_text(_run(situation)) for situation in chosen]
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(texts))


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]), int(sys.argv[2]))
