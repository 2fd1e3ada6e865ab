"""Make checkpoints with DeepSpeed's own classes.

    python -m twinstep.golden.record_checkpoints [FOLDER]

Per class two files: the state after two steps, and the weights that the same object has after two
more. Gradients are small whole numbers over powers of two, so that who reads the file can repeat
them. The universal checkpoint is made by DeepSpeed's engine and its converter.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from twinstep.golden.record_deepspeed import (
    BF16,
    FLAT,
    UNFUSED,
    bf16_optimizer,
    class_of,
    deepspeed_version,
)

FOLDER = Path(__file__).parent / "checkpoints"
CLASSES = {"flat": FLAT, "unfused": UNFUSED, "bf16": BF16}
SIZES = ((2, 3), (3,))
SCALING = {"init_scale": 16.0, "scale_window": 1000, "min_scale": 1.0}
UNIVERSALS = {"deepspeed_universal": "bfloat16", "deepspeed_universal_fp16": "float16"}
UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}


def gradient(step: int, place: int, numel: int) -> list[float]:
    """Gradient of a parameter in a step, unscaled: sixteenths between -1 and 1."""
    return [((7 * step + 3 * place + 5 * index) % 33 - 16) / 16 for index in range(numel)]


def start(place: int, numel: int) -> list[float]:
    """A parameter before the first step."""
    return [(place + 1) - index / 4 for index in range(numel)]


def record(kind: str, folder: Path) -> list[Path]:
    """Run one class and write both files."""
    import torch

    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    sizes = list(enumerate(SIZES))
    params = [
        torch.nn.Parameter(
            torch.tensor(start(place, torch.Size(size).numel()), dtype=dtype).view(size)
        )
        for place, size in sizes
    ]
    inner = torch.optim.AdamW(params, lr=0.25, weight_decay=0.125)
    optimizer = optimizer_of(kind, inner, params)

    def run(steps: range) -> None:
        for step in steps:
            for place, param in enumerate(params):
                values = torch.tensor(gradient(step, place, param.numel())).view(param.shape)
                param.grad = (values * (1.0 if kind == "bf16" else SCALING["init_scale"])).to(dtype)
            if kind == "bf16":
                optimizer.update_hp_grads()
            optimizer.step()

    run(range(2))
    paths = [folder / f"deepspeed_{kind}.pt", folder / f"deepspeed_{kind}_after.pt"]
    # DeepSpeed's FP16 wrappers lie under this key of the model file, the other one in a shard.
    key = "optimizer_state_dict" if kind == "bf16" else "optimizer"
    torch.save({key: optimizer.state_dict(), "ds_version": deepspeed_version()}, paths[0])
    run(range(2, 4))
    torch.save({"weights": [param.detach().clone() for param in params]}, paths[1])
    return paths


def optimizer_of(kind: str, inner: object, params: Sequence[object]) -> SimpleNamespace:
    """DeepSpeed's object around an inner optimizer."""
    deepspeed_version()
    if kind == "bf16":
        return bf16_optimizer(inner, {param: f"p{place}" for place, param in enumerate(params)})
    scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": SCALING}
    return class_of(CLASSES[kind])(inner, **scaling, verbose=False)


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.25, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 1000,
}


FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1000, "hysteresis": 2}


def record_universal(folder: Path, name: str, dtype: str) -> Path:
    """Train with the engine, save, and convert.

    Args:
        folder: where the checkpoint's folder is made.
        name: of that.
        dtype: "bfloat16" trains with BF16_Optimizer, "float16" with ZeRO and a dynamic scale.
    """
    deepspeed_version()
    import torch

    config: dict[str, object] = dict(CONFIG)
    if dtype == "float16":
        # It refuses fp16 on a CPU, where it computes all the same.
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        vars(accelerator)["is_fp16_supported"] = lambda: True
        config = {key: value for key, value in CONFIG.items() if key not in ("bf16", "data_types")}
        config["fp16"] = FP16
    kind: torch.dtype = getattr(torch, dtype)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for place, param in enumerate(model.parameters()):
            param.copy_(torch.tensor(start(place, param.numel())).view(param.shape))
    model = model.to(kind)
    initialize = import_module("deepspeed").initialize
    engine, *_ = initialize(model=model, config=config, model_parameters=list(model.parameters()))
    for step in range(3):
        inputs = torch.tensor([gradient(step, 0, 3)], dtype=kind)
        engine.backward((engine(inputs).float() ** 2).sum())
        engine.step()
    target = folder / name
    with tempfile.TemporaryDirectory() as scratch:
        engine.save_checkpoint(scratch, tag="t", client_state=UNIVERSAL_INFO)
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        places = ["--input_folder", f"{scratch}/t", "--output_folder", str(target)]
        subprocess.run([*convert, *places, *workers], check=True)
    # The model's own file and the pointer to the newest checkpoint are the engine's business.
    (target / "mp_rank_00_model_states.pt").unlink()
    (folder / "latest_universal").unlink()
    return target


def main(arguments: list[str]) -> int:
    """Write everything; exit code 2 when DeepSpeed is missing."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    try:
        written = [path for kind in CLASSES for path in record(kind, folder)]
        for name, dtype in UNIVERSALS.items():
            written.append(record_universal(folder, name, dtype))
    except ImportError as error:
        print(f"deepspeed should be installed to be recorded, but: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
