"""Real defects of overflow detection (C), loss scale and unscale (D), norms and clipping (E)."""

from __future__ import annotations

from twinstep.parity.proof.corpus.bug import DEEPSPEED, Bug, bug
from twinstep.parity.proof.corpus.bug_tests import COPIES, MESSAGES, RANKS, WRAPPERS

ROWS: dict[str, Bug] = {
    "C01": bug("return one indent too far left", "deepspeedai/DeepSpeed#7645"),
    "C02": bug(
        "overflow not reduced over data-parallel ranks",
        "deepspeedai/DeepSpeed#7568",
        "deepspeedai/DeepSpeed#7580",
        test=RANKS + "[not agreed]",
    ),
    "C04": bug("finite sum overflows: false alarm", "deepspeedai/DeepSpeed#8325"),
    "C05": bug("inf times zero", "deepspeedai/DeepSpeed#7171", "deepspeedai/DeepSpeed#5242"),
    "C07": bug(
        "flag copied before the async all-reduce finished",
        "pytorch/pytorch#115710",
        waits_for="asynchronous collectives",
    ),
    "C08": bug("later dtype group clears the flag", "flagos-ai/Torch-FL#235"),
    "C10": bug(
        "each module grid updates its own scaler first",
        "NVIDIA-NeMo/Megatron-Bridge#5591",
        test=RANKS + "[own scale]",
    ),
    "C11": bug(
        "only overflowing ranks return early",
        "hpcaitech/ColossalAI#1175",
        "facebookresearch/fairscale#754",
        test=MESSAGES + "[overflow leaves early]",
    ),
    "C13": bug(
        "no group means world", "deepspeedai/DeepSpeed#551", test=RANKS + "[no group means world]"
    ),
    "C14": bug(
        "skipped step invisible to the caller",
        "huggingface/accelerate#4242",
        "huggingface/accelerate#4243",
        "pytorch/pytorch#152279",
        test=WRAPPERS + "[SaysItStepped]",
    ),
    "C16": bug(
        "parameters used as gradient storage not restored on skip", "hpcaitech/ColossalAI#604"
    ),
    "C17": bug(
        "bf16 not checked at all",
        "deepspeedai/DeepSpeed#5241",
        "deepspeedai/DeepSpeed#6976",
        "deepspeedai/DeepSpeed#8035",
    ),
    "C19": bug(
        "rank without parameters never records a check",
        "pytorch/pytorch#99174",
        test=MESSAGES + "[nothing to check]",
    ),
    "C20": bug("truth value of a flag tensor", "NVIDIA/Megatron-LM@029025c4"),
    "C23": bug("overflow flag cleared by one block while others raise it", "NVIDIA/apex#753"),
    "C22": bug("overflow seen, but step not skipped in bf16 mode", DEEPSPEED),
    "D01": bug(
        "scale updated before the gradients are unscaled",
        "deepspeedai/DeepSpeed#8588",
        "deepspeedai/DeepSpeed#2695",
    ),
    "D02": bug("scale grows to infinity", "pytorch/pytorch#98828", "pytorch/pytorch#98876"),
    "D04": bug("static scale dropped on one construction path", "deepspeedai/DeepSpeed#546"),
    "D05": bug("bf16 divided by 65536", "deepspeedai/DeepSpeed#7837", "deepspeedai/DeepSpeed#7839"),
    "D07": bug(
        "scaler counters not saved",
        "facebookresearch/metaseq#3",
        test=WRAPPERS + "[ForgetsCounters]",
    ),
    "D08": bug(
        "scaler moved by its own load",
        "huggingface/accelerate#4289",
        test=WRAPPERS + "[LoadMovesTheScale]",
    ),
    "D10": bug("unscale twice in one step", "THUDM/slime#1842"),
    "D11": bug(
        "wrapper defeats the 'already unscaled' memory",
        "huggingface/accelerate#113",
        "huggingface/accelerate#115",
        waits_for="a scaler outside of the optimizer",
    ),
    "D13": bug(
        "scale read after the update, used for this step's loss", "facebookresearch/fairchem#617"
    ),
    "D14": bug(
        "accumulation divisor applied once per pipeline stage",
        "deepspeedai/DeepSpeed#8152",
        "deepspeedai/DeepSpeed#8154",
        waits_for="pipeline stages",
    ),
    "D16": bug(
        "bound checks test the wrong variable",
        "hpcaitech/ColossalAI#2521",
        waits_for="an upper bound of the scale",
    ),
    "D17": bug(
        "tracker missing in state dict",
        "hpcaitech/ColossalAI#2521",
        test=WRAPPERS + "[ForgetsTrackers]",
    ),
    "D19": bug(
        "hysteresis refill rule",
        "deepspeedai/DeepSpeed#3553",
        "deepspeedai/DeepSpeed#3008",
        "NVIDIA/apex#1733",
    ),
    "D20": bug("hysteresis honoured by one optimizer only", DEEPSPEED),
    "D22": bug(
        "scale in the accumulation window changes", test=WRAPPERS + "[BackwardMovesTheScale]"
    ),
    "D23": bug(
        "scaler used for bf16 autocast",
        "deepspeedai/DeepSpeed#7534",
        test=WRAPPERS + "[ScalesWithoutNeed]",
    ),
    "E01": bug("clip coefficient is max(1, c)", "deepspeedai/DeepSpeed#5150"),
    "E02": bug(
        "clip applied to scaled gradients",
        "NVIDIA/apex#1512",
        "Lightning-AI/pytorch-lightning#9330",
        "Lightning-AI/pytorch-lightning#9599",
        "milesial/Pytorch-UNet#470",
        "catalyst-team/catalyst#1319",
    ),
    "E04": bug("p-norm always 2", "hpcaitech/ColossalAI#4795"),
    "E05": bug(
        "norm accumulated in fp16",
        "facebookresearch/fairscale#263",
        "facebookresearch/fairscale#520",
        "NVIDIA/apex#92",
    ),
    "E07": bug(
        "expert / TP duplicates counted",
        "NVIDIA/Megatron-LM#3024",
        "NVIDIA/Megatron-LM#5916",
        "NVIDIA/Megatron-LM#6099",
        "hpcaitech/ColossalAI#2521",
        test=RANKS + "[duplicates count]",
    ),
    "E08": bug("replicated strategy summed over ranks", "pytorch/pytorch#88955", test=COPIES),
    "E10": bug(
        "norm of the wrong gradient attribute",
        "NVIDIA/Megatron-LM@a82fa72d",
        "NVIDIA/Megatron-LM#4802",
        "NVIDIA/Megatron-LM#4133",
    ),
    "E11": bug(
        "empty list of gradients",
        "NVIDIA/Megatron-LM#5529",
        "NVIDIA/Megatron-LM#5530",
        "deepspeedai/DeepSpeed#5145",
        "deepspeedai/DeepSpeed#5148",
        "meta-pytorch/torchrec#3809",
    ),
    "E13": bug(
        "reported norm not divided by the scale",
        "deepspeedai/DeepSpeed#8588",
        "deepspeedai/DeepSpeed#2695",
    ),
    "E14": bug(
        "local part of a sharded norm reported",
        "radixark/miles_diffusion#35",
        "pytorch/pytorch#126457",
        test=RANKS + "[own part reported]",
    ),
    "E16": bug(
        "expert norm averaged on the wrong device",
        "deepspeedai/DeepSpeed#5203",
        "deepspeedai/DeepSpeed#5220",
        waits_for="CPU offload",
    ),
    "E17": bug("result buffer cached by list length", DEEPSPEED),
    "E19": bug("norm over padding"),
    "E20": bug(
        "cached grad norm from before accumulation ended",
        test=WRAPPERS + "[NormOfTheFirstBackward]",
    ),
}
