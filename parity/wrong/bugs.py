"""Real defects that projects shipped, one row each: what it was and where it can be read about.

Ids are stable: A Adam kernels, counters and state; B LAMB, Lion and low-bit variants; C overflow
detection; D loss scale and unscale; E norms and clipping; F bf16, master weights, accumulation;
I Triton, graphs and compilers. `waits_for` names what has to exist before a row can be replanted
here; every other row is planted by at least one entry of the corpus, and a test holds that so.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "deepspeedai/DeepSpeed (its source)"


@dataclass(frozen=True)
class Bug:
    """One real defect.

    Attributes:
        title: what went wrong, in a few words.
        places: issues, pull requests or commits; empty for a pattern without a public thread.
        waits_for: empty, or the component that must exist before the row can be replanted.
    """

    title: str
    places: tuple[str, ...]
    waits_for: str = ""


BUGS: dict[str, Bug] = {
    "A01": Bug("beta1 squared-in on the scalar tail", ("deepspeedai/DeepSpeed#503",)),
    "A02": Bug(
        "first dimension taken for element count",
        (
            "deepspeedai/DeepSpeed#3109",
            "hpcaitech/ColossalAI#633",
        ),
    ),
    "A04": Bug(
        "staging buffer reused before its async copy ended",
        (
            "deepspeedai/DeepSpeed#735",
            "deepspeedai/DeepSpeed#679",
        ),
        "CPU offload",
    ),
    "A05": Bug(
        "bias-correction powers advanced once per call, not per step",
        (
            "deepspeedai/DeepSpeed#7982",
            "deepspeedai/DeepSpeed#7819",
        ),
    ),
    "A07": Bug("one counter, bumped once per dtype list", ("deepspeedai/DeepSpeed#8471",)),
    "A08": Bug(
        "intermittent gradient switches whose counter is used", ("deepspeedai/DeepSpeed#8471",)
    ),
    "A10": Bug("rollback after decrement", ("deepspeedai/DeepSpeed#7906",), "rollback"),
    "A11": Bug(
        "eps multiplied by the bias correction",
        (
            "pytorch/pytorch#22628",
            "huggingface/transformers#35504",
        ),
    ),
    "A13": Bug(
        "Adam silently means AdamW (and back)",
        (
            "deepspeedai/DeepSpeed#844",
            "deepspeedai/DeepSpeed#482",
        ),
    ),
    "A14": Bug(
        "int32 tensor sizes in launch metadata",
        (
            "deepspeedai/DeepSpeed#7640",
            "deepspeedai/DeepSpeed#7639",
            "NVIDIA/apex#1825",
            "NVIDIA/TransformerEngine#2918",
            "NVIDIA/TransformerEngine#3136",
        ),
        "index arithmetic past 2**31 elements",
    ),
    "A16": Bug("grid of zero blocks for small tensors", ("bytedance/lightseq#98",)),
    "A17": Bug(
        "trailing empty tensor drops the last launch",
        (
            "NVIDIA/TransformerEngine#3212",
            "pytorch/pytorch#109402",
        ),
    ),
    "A19": Bug(
        "moments cast through the parameter dtype",
        (
            "NVIDIA/TransformerEngine#1888",
            "databricks/flashoptim#2",
        ),
    ),
    "A20": Bug(
        "split master: rounding not undone",
        ("NVIDIA/TransformerEngine#1408",),
        "split master weights",
    ),
    "A22": Bug("arithmetic in the storage dtype", ("pytorch/ao#1068",)),
    "A23": Bug("step counter in default dtype saturates", ("pytorch/ao#4915",)),
    "A25": Bug(
        "counter not advanced for an empty group",
        (
            "NVIDIA/TransformerEngine#1986",
            "NVIDIA/TransformerEngine#3318",
        ),
    ),
    "A26": Bug("empty group crashes construction", ("NVIDIA/apex#1596",)),
    "A28": Bug(
        "fused kernel unscales already unscaled grads",
        (
            "pytorch/pytorch#94060",
            "pytorch/pytorch#90752",
        ),
    ),
    "A29": Bug(
        "found_inf dropped when there is no scale",
        (
            "pytorch/pytorch#95781",
            "pytorch/pytorch#95847",
        ),
    ),
    "A31": Bug("out-of-place accumulate", ("deepspeedai/DeepSpeed#1278",)),
    "A32": Bug(
        "decay of weights that are frozen",
        (
            "deepspeedai/DeepSpeed#1780",
            "deepspeedai/DeepSpeed#8029",
        ),
        "whole optimizers",
    ),
    "A34": Bug("one lr tensor shared by all groups", ("pytorch/ao#2606",), "whole optimizers"),
    "A35": Bug("lookup table created in default dtype", ("pytorch/ao#2286",), "quantised state"),
    "A37": Bug(
        "quantisation map built wrongly by an indent",
        ("bitsandbytes-foundation/bitsandbytes#152",),
        "quantised state",
    ),
    "A38": Bug(
        "non-contiguous params or grads",
        (
            "bitsandbytes-foundation/bitsandbytes#1187",
            "bitsandbytes-foundation/bitsandbytes#1902",
        ),
        "non-contiguous layouts",
    ),
    "A40": Bug(
        "layout checked per tensor, not across lists",
        (
            "NVIDIA/apex#732",
            "pytorch/pytorch#106951",
            "pytorch/pytorch#107984",
            "pytorch/pytorch#126585",
        ),
        "non-contiguous layouts",
    ),
    "A41": Bug(
        "kernel launched on the wrong device or stream",
        (
            "NVIDIA/apex#752",
            "NVIDIA/apex#927",
            "bitsandbytes-foundation/bitsandbytes#1691",
        ),
        "a second device",
    ),
    "A43": Bug("CPU Adagrad: decay only in the denominator", (SOURCE,)),
    "A44": Bug("tail loop overwrites the gradient", (SOURCE,)),
    "A46": Bug(
        "gradient None treated as absent in one place only",
        (
            "deepspeedai/DeepSpeed#83",
            "deepspeedai/DeepSpeed#291",
        ),
        "whole optimizers",
    ),
    "A47": Bug("fp16 norm used to initialise the second moment", ("NVIDIA/apex@7a219aa9",)),
    "B01": Bug("beta2 and beta3 read from the beta1 array", ("NVIDIA/apex#1007",)),
    "B02": Bug(
        "clipping per group instead of globally",
        (
            "NVIDIA/apex@32d2c4e2",
            "NVIDIA/apex@5b300119",
        ),
    ),
    "B04": Bug("LAMB bias correction folded into step size", (SOURCE,), "LAMB"),
    "B05": Bug("scratch of the second reduction phase not zeroed", (SOURCE,), "LAMB"),
    "B07": Bug("empty parameter makes the global scale NaN", ("deepspeedai/DeepSpeed#7736",)),
    "B08": Bug("Lion: sign(0) treated as -1", (SOURCE,), "Lion"),
    "B10": Bug(
        "Lion with coupled weight decay",
        (
            "bitsandbytes-foundation/bitsandbytes#1993",
            "bitsandbytes-foundation/bitsandbytes#2001",
        ),
        "Lion",
    ),
    "B11": Bug("Lion beta2 passed as 0", ("bitsandbytes-foundation/bitsandbytes@2eb31083",)),
    "B13": Bug(
        "optimizer missing from one dispatch table",
        (
            "bitsandbytes-foundation/bitsandbytes#1855",
            "bitsandbytes-foundation/bitsandbytes#1902",
        ),
        "LAMB and LARS",
    ),
    "B14": Bug(
        "wrong variable in the weight-decay branch",
        ("bitsandbytes-foundation/bitsandbytes@4a05df34",),
        "whole optimizers",
    ),
    "B16": Bug(
        "override registered but never read",
        (
            "bitsandbytes-foundation/bitsandbytes#1869",
            "bitsandbytes-foundation/bitsandbytes#1269",
        ),
        "whole optimizers",
    ),
    "B17": Bug("norm reduced over the wrong ranks", ("NVIDIA/apex#1266",), "ranks"),
    "B19": Bug(
        "LAMB norm on CPU shard needs a GPU collective",
        (
            "hpcaitech/ColossalAI#6400",
            "hpcaitech/ColossalAI#6431",
        ),
        "CPU offload",
    ),
    "B20": Bug(
        "unmasked store of block maxima",
        (
            "bitsandbytes-foundation/bitsandbytes#2042",
            "bitsandbytes-foundation/bitsandbytes#2043",
        ),
    ),
    "C01": Bug("return one indent too far left", ("deepspeedai/DeepSpeed#7645",)),
    "C02": Bug(
        "overflow not reduced over data-parallel ranks",
        (
            "deepspeedai/DeepSpeed#7568",
            "deepspeedai/DeepSpeed#7580",
        ),
        "ranks",
    ),
    "C04": Bug("finite sum overflows: false alarm", ("deepspeedai/DeepSpeed#8325",)),
    "C05": Bug(
        "inf times zero",
        (
            "deepspeedai/DeepSpeed#7171",
            "deepspeedai/DeepSpeed#5242",
        ),
    ),
    "C07": Bug(
        "flag copied before the async all-reduce finished", ("pytorch/pytorch#115710",), "ranks"
    ),
    "C08": Bug("later dtype group clears the flag", ("flagos-ai/Torch-FL#235",)),
    "C10": Bug(
        "each module grid updates its own scaler first",
        ("NVIDIA-NeMo/Megatron-Bridge#5591",),
        "ranks",
    ),
    "C11": Bug(
        "only overflowing ranks return early",
        (
            "hpcaitech/ColossalAI#1175",
            "facebookresearch/fairscale#754",
        ),
        "ranks",
    ),
    "C13": Bug("no group means world", ("deepspeedai/DeepSpeed#551",), "ranks"),
    "C14": Bug(
        "skipped step invisible to the caller",
        (
            "huggingface/accelerate#4242",
            "huggingface/accelerate#4243",
            "pytorch/pytorch#152279",
        ),
        "whole optimizers",
    ),
    "C16": Bug(
        "parameters used as gradient storage not restored on skip", ("hpcaitech/ColossalAI#604",)
    ),
    "C17": Bug(
        "bf16 not checked at all",
        (
            "deepspeedai/DeepSpeed#5241",
            "deepspeedai/DeepSpeed#6976",
            "deepspeedai/DeepSpeed#8035",
        ),
    ),
    "C19": Bug(
        "rank without parameters never records a check", ("pytorch/pytorch#99174",), "ranks"
    ),
    "C20": Bug("truth value of a flag tensor", ("NVIDIA/Megatron-LM@029025c4",)),
    "C22": Bug("overflow seen, but step not skipped in bf16 mode", (SOURCE,)),
    "D01": Bug(
        "scale updated before the gradients are unscaled",
        (
            "deepspeedai/DeepSpeed#8588",
            "deepspeedai/DeepSpeed#2695",
        ),
    ),
    "D02": Bug(
        "scale grows to infinity",
        (
            "pytorch/pytorch#98828",
            "pytorch/pytorch#98876",
        ),
    ),
    "D04": Bug(
        "static scale dropped on one construction path",
        ("deepspeedai/DeepSpeed#546",),
        "whole optimizers",
    ),
    "D05": Bug(
        "bf16 divided by 65536",
        (
            "deepspeedai/DeepSpeed#7837",
            "deepspeedai/DeepSpeed#7839",
        ),
        "whole optimizers",
    ),
    "D07": Bug("scaler counters not saved", ("facebookresearch/metaseq#3",), "checkpoints"),
    "D08": Bug("scaler moved by its own load", ("huggingface/accelerate#4289",), "checkpoints"),
    "D10": Bug("unscale twice in one step", ("THUDM/slime#1842",)),
    "D11": Bug(
        "wrapper defeats the 'already unscaled' memory",
        (
            "huggingface/accelerate#113",
            "huggingface/accelerate#115",
        ),
        "whole optimizers",
    ),
    "D13": Bug(
        "scale read after the update, used for this step's loss", ("facebookresearch/fairchem#617",)
    ),
    "D14": Bug(
        "accumulation divisor applied once per pipeline stage",
        (
            "deepspeedai/DeepSpeed#8152",
            "deepspeedai/DeepSpeed#8154",
        ),
        "pipeline stages",
    ),
    "D16": Bug(
        "bound checks test the wrong variable", ("hpcaitech/ColossalAI#2521",), "whole optimizers"
    ),
    "D17": Bug("tracker missing in state dict", ("hpcaitech/ColossalAI#2521",), "checkpoints"),
    "D19": Bug(
        "hysteresis refill rule",
        (
            "deepspeedai/DeepSpeed#3553",
            "deepspeedai/DeepSpeed#3008",
            "NVIDIA/apex#1733",
        ),
    ),
    "D20": Bug("hysteresis honoured by one optimizer only", (SOURCE,)),
    "D22": Bug("scale in the accumulation window changes", (), "whole optimizers"),
    "D23": Bug(
        "scaler used for bf16 autocast", ("deepspeedai/DeepSpeed#7534",), "whole optimizers"
    ),
    "E01": Bug("clip coefficient is max(1, c)", ("deepspeedai/DeepSpeed#5150",)),
    "E02": Bug(
        "clip applied to scaled gradients",
        (
            "NVIDIA/apex#1512",
            "Lightning-AI/pytorch-lightning#9330",
            "Lightning-AI/pytorch-lightning#9599",
            "milesial/Pytorch-UNet#470",
            "catalyst-team/catalyst#1319",
        ),
    ),
    "E04": Bug("p-norm always 2", ("hpcaitech/ColossalAI#4795",)),
    "E05": Bug(
        "norm accumulated in fp16",
        (
            "facebookresearch/fairscale#263",
            "facebookresearch/fairscale#520",
            "NVIDIA/apex#92",
        ),
    ),
    "E07": Bug(
        "expert / TP duplicates counted",
        (
            "NVIDIA/Megatron-LM#3024",
            "NVIDIA/Megatron-LM#5916",
            "NVIDIA/Megatron-LM#6099",
            "hpcaitech/ColossalAI#2521",
        ),
        "ranks",
    ),
    "E08": Bug("replicated strategy summed over ranks", ("pytorch/pytorch#88955",), "ranks"),
    "E10": Bug(
        "norm of the wrong gradient attribute",
        (
            "NVIDIA/Megatron-LM@a82fa72d",
            "NVIDIA/Megatron-LM#4802",
            "NVIDIA/Megatron-LM#4133",
        ),
    ),
    "E11": Bug(
        "empty list of gradients",
        (
            "NVIDIA/Megatron-LM#5529",
            "NVIDIA/Megatron-LM#5530",
            "deepspeedai/DeepSpeed#5145",
            "deepspeedai/DeepSpeed#5148",
            "meta-pytorch/torchrec#3809",
        ),
    ),
    "E13": Bug(
        "reported norm not divided by the scale",
        (
            "deepspeedai/DeepSpeed#8588",
            "deepspeedai/DeepSpeed#2695",
        ),
    ),
    "E14": Bug(
        "local part of a sharded norm reported",
        (
            "radixark/miles_diffusion#35",
            "pytorch/pytorch#126457",
        ),
        "ranks",
    ),
    "E16": Bug(
        "expert norm averaged on the wrong device",
        (
            "deepspeedai/DeepSpeed#5203",
            "deepspeedai/DeepSpeed#5220",
        ),
        "CPU offload",
    ),
    "E17": Bug("result buffer cached by list length", (SOURCE,)),
    "E19": Bug("norm over padding", ()),
    "E20": Bug("cached grad norm from before accumulation ended", (), "whole optimizers"),
    "F01": Bug(
        "no master copy",
        (
            "workofart/ml-by-hand#85",
            "pytorch/pytorch#120376",
        ),
    ),
    "F02": Bug("decay below half an ulp", ("Nerogar/OneTrainer#996",)),
    "F04": Bug(
        "boundary micro-batch added after the all-reduce", ("deepspeedai/DeepSpeed#7985",), "ranks"
    ),
    "F05": Bug(
        "cast to fp32 present only in a deleted helper",
        ("deepspeedai/DeepSpeed#6485",),
        "whole optimizers",
    ),
    "F07": Bug(
        "accumulation in bf16",
        (
            "deepspeedai/DeepSpeed#2768",
            "linkedin/Liger-Kernel#830",
            "linkedin/Liger-Kernel#950",
        ),
    ),
    "F08": Bug(
        "weights-only load leaves stale masters",
        (
            "deepspeedai/DeepSpeed#762",
            "deepspeedai/DeepSpeed#2101",
            "deepspeedai/DeepSpeed#4141",
            "NovaSky-AI/SkyRL#2149",
            "hpcaitech/ColossalAI#4618",
        ),
        "checkpoints",
    ),
    "F10": Bug("nested loops over groups", ("deepspeedai/DeepSpeed#7054",), "whole optimizers"),
    "F11": Bug("only the last bucket converted back", ("facebookresearch/fairscale#751",), "ranks"),
    "F13": Bug(
        "biased stochastic rounding",
        (
            "pytorch/ao#1124",
            "pytorch/ao#3266",
        ),
    ),
    "F14": Bug("same random bits for every parameter or every step", (), "stochastic rounding"),
    "F16": Bug("read-modify-write in a 16-bit buffer", ("linkedin/Liger-Kernel#1329",)),
    "F17": Bug(
        "reused gradient buffer as parameter gather buffer", ("NVIDIA/Megatron-LM@c2c36f77",)
    ),
    "I01": Bug(
        "autotuner runs an in-place optimizer kernel many times",
        (
            "lucidrains/lion-pytorch#36",
            "triton-lang/triton#6547",
            "triton-lang/triton#781",
            "triton-lang/triton#2549",
            "flagos-ai/FlagGems#3753",
        ),
    ),
    "I02": Bug(
        "clone in a pre-hook returns the wrong tensor",
        (
            "lucidrains/lion-pytorch@3d1e555",
            "lucidrains/lion-pytorch@974b754",
        ),
        "autotuned kernels",
    ),
    "I04": Bug(
        "mask computed, not passed (or wrong frame)",
        (
            "Dao-AILab/flash-attention#2789",
            "bitsandbytes-foundation/bitsandbytes#2042",
            "bitsandbytes-foundation/bitsandbytes#2043",
            "NVIDIA/Megatron-LM#7103",
            "thunlp/TritonBench#12",
        ),
    ),
    "I05": Bug(
        "int32 program offset",
        (
            "linkedin/Liger-Kernel#251",
            "linkedin/Liger-Kernel#1248",
            "bitsandbytes-foundation/bitsandbytes#1784",
        ),
        "index arithmetic past 2**31 elements",
    ),
    "I07": Bug(
        "approximate divide and sqrt",
        (
            "triton-lang/triton#10661",
            "triton-lang/triton#10073",
            "triton-lang/triton#9262",
        ),
    ),
    "I08": Bug(
        "interpreter and GPU disagree",
        (
            "triton-lang/triton#4972",
            "triton-lang/triton#8322",
            "triton-lang/triton#11153",
            "triton-lang/triton#5895",
            "triton-lang/triton#6227",
        ),
        "a GPU",
    ),
    "I10": Bug(
        "compiler race for one warp/stage choice",
        (
            "triton-lang/triton#10590",
            "fla-org/flash-linear-attention#945",
            "fla-org/flash-linear-attention#1228",
        ),
        "a GPU",
    ),
    "I11": Bug(
        "step and lr frozen at capture",
        (
            "pytorch/pytorch#76368",
            "pytorch/pytorch#77862",
            "pytorch/pytorch#106802",
            "tracel-ai/burn#5779",
        ),
    ),
    "I13": Bug("in-place kernel eats the caller's gradient", ("linkedin/Liger-Kernel#1305",)),
    "I14": Bug("non-deterministic sum by atomics", ("triton-lang/triton#6227",)),
    "I16": Bug(
        "reset hook not run after tuning", ("triton-lang/triton#7181",), "autotuned kernels"
    ),
}
