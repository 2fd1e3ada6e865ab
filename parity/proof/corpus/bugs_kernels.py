"""Real defects of Adam kernels, counters and state (A), LAMB, Lion and low-bit variants (B)."""

from __future__ import annotations

from twinstep.parity.proof.corpus.bug import DEEPSPEED, Bug, bug
from twinstep.parity.proof.corpus.bug_tests import RANKS

ROWS: dict[str, Bug] = {
    "A01": bug("beta1 squared-in on the scalar tail", "deepspeedai/DeepSpeed#503"),
    "A02": bug(
        "first dimension taken for element count",
        "deepspeedai/DeepSpeed#3109",
        "hpcaitech/ColossalAI#633",
    ),
    "A04": bug(
        "staging buffer reused before its async copy ended",
        "deepspeedai/DeepSpeed#735",
        "deepspeedai/DeepSpeed#679",
    ),
    "A05": bug(
        "bias-correction powers advanced once per call, not per step",
        "deepspeedai/DeepSpeed#7982",
        "deepspeedai/DeepSpeed#7819",
    ),
    "A07": bug("one counter, bumped once per dtype list", "deepspeedai/DeepSpeed#8471"),
    "A08": bug(
        "intermittent gradient switches whose counter is used", "deepspeedai/DeepSpeed#8471"
    ),
    "A10": bug("rollback after decrement", "deepspeedai/DeepSpeed#7906", waits_for="rollback"),
    "A11": bug(
        "eps multiplied by the bias correction",
        "pytorch/pytorch#22628",
        "huggingface/transformers#35504",
    ),
    "A13": bug(
        "Adam silently means AdamW (and back)",
        "deepspeedai/DeepSpeed#844",
        "deepspeedai/DeepSpeed#482",
    ),
    "A14": bug(
        "int32 tensor sizes in launch metadata",
        "deepspeedai/DeepSpeed#7640",
        "deepspeedai/DeepSpeed#7639",
        "NVIDIA/apex#1825",
        "NVIDIA/TransformerEngine#2918",
        "NVIDIA/TransformerEngine#3136",
    ),
    "A16": bug("grid of zero blocks for small tensors", "bytedance/lightseq#98"),
    "A17": bug(
        "trailing empty tensor drops the last launch",
        "NVIDIA/TransformerEngine#3212",
        "pytorch/pytorch#109402",
    ),
    "A19": bug(
        "moments cast through the parameter dtype",
        "NVIDIA/TransformerEngine#1888",
        "databricks/flashoptim#2",
    ),
    "A20": bug("split master: rounding not undone", "NVIDIA/TransformerEngine#1408"),
    "A22": bug("arithmetic in the storage dtype", "pytorch/ao#1068"),
    "A23": bug("step counter in default dtype saturates", "pytorch/ao#4915"),
    "A25": bug(
        "counter not advanced for an empty group",
        "NVIDIA/TransformerEngine#1986",
        "NVIDIA/TransformerEngine#3318",
    ),
    "A26": bug("empty group crashes construction", "NVIDIA/apex#1596"),
    "A28": bug(
        "fused kernel unscales already unscaled grads",
        "pytorch/pytorch#94060",
        "pytorch/pytorch#90752",
    ),
    "A29": bug(
        "found_inf dropped when there is no scale", "pytorch/pytorch#95781", "pytorch/pytorch#95847"
    ),
    "A31": bug("out-of-place accumulate", "deepspeedai/DeepSpeed#1278"),
    "A32": bug(
        "decay of weights that are frozen",
        "deepspeedai/DeepSpeed#1780",
        "deepspeedai/DeepSpeed#8029",
    ),
    "A34": bug("one lr tensor shared by all groups", "pytorch/ao#2606"),
    "A35": bug(
        "lookup table created in default dtype", "pytorch/ao#2286", waits_for="quantised state"
    ),
    "A37": bug(
        "quantisation map built wrongly by an indent",
        "bitsandbytes-foundation/bitsandbytes#152",
        waits_for="quantised state",
    ),
    "A38": bug(
        "non-contiguous params or grads",
        "bitsandbytes-foundation/bitsandbytes#1187",
        "bitsandbytes-foundation/bitsandbytes#1902",
    ),
    "A40": bug(
        "layout checked per tensor, not across lists",
        "NVIDIA/apex#732",
        "pytorch/pytorch#106951",
        "pytorch/pytorch#107984",
        "pytorch/pytorch#126585",
    ),
    "A41": bug(
        "kernel launched on the wrong device or stream",
        "NVIDIA/apex#752",
        "NVIDIA/apex#927",
        "bitsandbytes-foundation/bitsandbytes#1691",
        waits_for="a second device",
    ),
    "A43": bug("CPU Adagrad: decay only in the denominator", DEEPSPEED),
    "A44": bug("tail loop overwrites the gradient", DEEPSPEED),
    "A46": bug(
        "gradient None treated as absent in one place only",
        "deepspeedai/DeepSpeed#83",
        "deepspeedai/DeepSpeed#291",
    ),
    "A47": bug("fp16 norm used to initialise the second moment", "NVIDIA/apex@7a219aa9"),
    "B01": bug("beta2 and beta3 read from the beta1 array", "NVIDIA/apex#1007"),
    "B02": bug(
        "clipping per group instead of globally", "NVIDIA/apex@32d2c4e2", "NVIDIA/apex@5b300119"
    ),
    "B04": bug("LAMB bias correction folded into step size", DEEPSPEED),
    "B05": bug("scratch of the second reduction phase not zeroed", DEEPSPEED),
    "B07": bug("empty parameter makes the global scale NaN", "deepspeedai/DeepSpeed#7736"),
    "B08": bug("Lion: sign(0) treated as -1", DEEPSPEED, waits_for="Lion"),
    "B10": bug(
        "Lion with coupled weight decay",
        "bitsandbytes-foundation/bitsandbytes#1993",
        "bitsandbytes-foundation/bitsandbytes#2001",
        waits_for="Lion",
    ),
    "B11": bug("Lion beta2 passed as 0", "bitsandbytes-foundation/bitsandbytes@2eb31083"),
    "B13": bug(
        "optimizer missing from one dispatch table",
        "bitsandbytes-foundation/bitsandbytes#1855",
        "bitsandbytes-foundation/bitsandbytes#1902",
    ),
    "B14": bug(
        "wrong variable in the weight-decay branch", "bitsandbytes-foundation/bitsandbytes@4a05df34"
    ),
    "B16": bug(
        "override registered but never read",
        "bitsandbytes-foundation/bitsandbytes#1869",
        "bitsandbytes-foundation/bitsandbytes#1269",
    ),
    "B17": bug(
        "norm reduced over the wrong ranks", "NVIDIA/apex#1266", test=RANKS + "[wrong ranks]"
    ),
    "B19": bug(
        "LAMB norm on CPU shard needs a GPU collective",
        "hpcaitech/ColossalAI#6400",
        "hpcaitech/ColossalAI#6431",
        waits_for="CPU offload",
    ),
    "B21": bug(
        "partial sums of a norm read without an order",
        "NVIDIA/apex#1798",
        "pytorch/pytorch#5242",
    ),
    "B20": bug(
        "unmasked store of block maxima",
        "bitsandbytes-foundation/bitsandbytes#2042",
        "bitsandbytes-foundation/bitsandbytes#2043",
    ),
}
