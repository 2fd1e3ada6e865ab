"""Real defects of bf16, master weights and accumulation (F), Triton, graphs and compilers (I)."""

from __future__ import annotations

from twinstep.parity.proof.corpus.bug import Bug, bug
from twinstep.parity.proof.corpus.bug_tests import WRAPPERS

ROWS: dict[str, Bug] = {
    "F01": bug("no master copy", "workofart/ml-by-hand#85", "pytorch/pytorch#120376"),
    "F02": bug("decay below half an ulp", "Nerogar/OneTrainer#996"),
    "F04": bug(
        "boundary micro-batch added after the all-reduce",
        "deepspeedai/DeepSpeed#7985",
        waits_for="an engine",
    ),
    "F05": bug("cast to fp32 present only in a deleted helper", "deepspeedai/DeepSpeed#6485"),
    "F07": bug(
        "accumulation in bf16",
        "deepspeedai/DeepSpeed#2768",
        "linkedin/Liger-Kernel#830",
        "linkedin/Liger-Kernel#950",
    ),
    "F08": bug(
        "weights-only load leaves stale masters",
        "deepspeedai/DeepSpeed#762",
        "deepspeedai/DeepSpeed#2101",
        "deepspeedai/DeepSpeed#4141",
        "NovaSky-AI/SkyRL#2149",
        "hpcaitech/ColossalAI#4618",
        test=WRAPPERS + "[OldMasters]",
    ),
    "F10": bug("nested loops over groups", "deepspeedai/DeepSpeed#7054"),
    "F11": bug("only the last bucket converted back", "facebookresearch/fairscale#751"),
    "F13": bug("biased stochastic rounding", "pytorch/ao#1124", "pytorch/ao#3266"),
    "F14": bug("same random bits for every parameter or every step"),
    "F16": bug("read-modify-write in a 16-bit buffer", "linkedin/Liger-Kernel#1329"),
    "F17": bug("reused gradient buffer as parameter gather buffer", "NVIDIA/Megatron-LM@c2c36f77"),
    "I01": bug(
        "autotuner runs an in-place optimizer kernel many times",
        "lucidrains/lion-pytorch#36",
        "triton-lang/triton#6547",
        "triton-lang/triton#781",
        "triton-lang/triton#2549",
        "flagos-ai/FlagGems#3753",
    ),
    "I02": bug(
        "clone in a pre-hook returns the wrong tensor",
        "lucidrains/lion-pytorch@3d1e555",
        "lucidrains/lion-pytorch@974b754",
    ),
    "I04": bug(
        "mask computed, not passed (or wrong frame)",
        "Dao-AILab/flash-attention#2789",
        "bitsandbytes-foundation/bitsandbytes#2042",
        "bitsandbytes-foundation/bitsandbytes#2043",
        "NVIDIA/Megatron-LM#7103",
        "thunlp/TritonBench#12",
    ),
    "I05": bug(
        "int32 program offset",
        "linkedin/Liger-Kernel#251",
        "linkedin/Liger-Kernel#1248",
        "bitsandbytes-foundation/bitsandbytes#1784",
    ),
    "I07": bug(
        "approximate divide and sqrt",
        "triton-lang/triton#10661",
        "triton-lang/triton#10073",
        "triton-lang/triton#9262",
    ),
    "I08": bug(
        "interpreter and GPU disagree",
        "triton-lang/triton#4972",
        "triton-lang/triton#8322",
        "triton-lang/triton#11153",
        "triton-lang/triton#5895",
        "triton-lang/triton#6227",
        waits_for="a GPU",
    ),
    "I10": bug(
        "compiler race for one warp/stage choice",
        "triton-lang/triton#10590",
        "fla-org/flash-linear-attention#945",
        "fla-org/flash-linear-attention#1228",
        waits_for="a GPU",
    ),
    "I11": bug(
        "step and lr frozen at capture",
        "pytorch/pytorch#76368",
        "pytorch/pytorch#77862",
        "pytorch/pytorch#106802",
        "tracel-ai/burn#5779",
    ),
    "I13": bug("in-place kernel eats the caller's gradient", "linkedin/Liger-Kernel#1305"),
    "I14": bug("non-deterministic sum by atomics", "triton-lang/triton#6227"),
    "I16": bug("reset hook not run after tuning", "triton-lang/triton#7181"),
}
