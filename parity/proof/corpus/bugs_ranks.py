"""Real defects of partitions, reduction and offload (G), checkpoint and resume (H)."""

from __future__ import annotations

from twinstep.parity.proof.corpus.bug import DEEPSPEED, Bug, bug
from twinstep.parity.proof.corpus.bug_tests import NAMES, PARTITIONS, RANKS, SCHEDULES, WRAPPERS

ROWS: dict[str, Bug] = {
    "G01": bug(
        "ping-pong index reset on every flush",
        "deepspeedai/DeepSpeed#6993",
        "deepspeedai/DeepSpeed#7188",
        "deepspeedai/DeepSpeed#7371",
        "deepspeedai/DeepSpeed#7805",
        waits_for="ZeroOptimizer",
    ),
    "G02": bug("bucket counter not reset", "deepspeedai/DeepSpeed#186", waits_for="ZeroOptimizer"),
    "G04": bug(
        "padding assumed only on the last rank",
        "deepspeedai/DeepSpeed#6974",
        test=PARTITIONS + "[padding only on the last rank]",
    ),
    "G05": bug(
        "whole bucket averaged, not its filled part",
        "deepspeedai/DeepSpeed#5268",
        waits_for="ZeroOptimizer",
    ),
    "G07": bug(
        "partition id from the outer loop",
        "deepspeedai/DeepSpeed#2058",
        "deepspeedai/DeepSpeed#2059",
        test=PARTITIONS + "[partition of the outer loop]",
    ),
    "G08": bug(
        "offload copy missing, then done by non-owners",
        "deepspeedai/DeepSpeed#1679",
        "deepspeedai/DeepSpeed#1841",
        waits_for="CPU offload",
    ),
    "G10": bug(
        "adjacent ranges of different groups merged",
        "deepspeedai/DeepSpeed#3521",
        "deepspeedai/DeepSpeed#3577",
        waits_for="ZeroOptimizer",
    ),
    "G11": bug(
        "expert gradients divided twice, or by the wrong size",
        "deepspeedai/DeepSpeed#4957",
        "deepspeedai/DeepSpeed#6545",
        "deepspeedai/DeepSpeed#6546",
        "NVIDIA/Megatron-LM@3bdcbbbe",
        "deepspeedai/DeepSpeed#5555",
        waits_for="an engine",
    ),
    "G13": bug(
        "gradient pieces stitched per partition",
        "deepspeedai/DeepSpeed#318",
        waits_for="ZeroOptimizer",
    ),
    "G14": bug(
        "micro-step id starts at 0 once, at -1 later",
        "deepspeedai/DeepSpeed#6550",
        waits_for="ZeroOptimizer",
    ),
    "G16": bug(
        "several backwards per step with GAS = 1",
        "deepspeedai/DeepSpeed#7981",
        "allenai/open-instruct#1498",
        test=WRAPPERS + "[LastBackwardCounts]",
    ),
    "G17": bug(
        "groups smaller than the world, empty partitions",
        "deepspeedai/DeepSpeed#202",
        "deepspeedai/DeepSpeed#273",
        "deepspeedai/DeepSpeed#275",
        test=PARTITIONS + "[dtype of an empty partition]",
    ),
    "G19": bug(
        "other ranks' gradients not cleared",
        "deepspeedai/DeepSpeed#684",
        "deepspeedai/DeepSpeed#856",
        test=PARTITIONS + "[gradients of others not cleared]",
    ),
    "G20": bug(
        "transient gradients reduced", "deepspeedai/DeepSpeed#7829", waits_for="ZeroOptimizer"
    ),
    "G22": bug(
        "buffer freed while the side stream reads it",
        "deepspeedai/DeepSpeed#7965",
        waits_for="ZeroOptimizer",
    ),
    "G23": bug(
        "non-blocking copies not waited for",
        "pytorch/ao#1650",
        "facebookresearch/fairscale#496",
        "facebookresearch/fairscale#512",
        "hpcaitech/ColossalAI#4404",
        "deepspeedai/DeepSpeed#1219",
        "deepspeedai/DeepSpeed#3097",
        waits_for="CPU offload",
    ),
    "G25": bug(
        "gradients arriving in another order on another rank",
        "deepspeedai/DeepSpeed#2343",
        waits_for="ZeroOptimizer",
    ),
    "G26": bug(
        "bucket size changes convergence", "deepspeedai/DeepSpeed#6351", waits_for="ZeroOptimizer"
    ),
    "G28": bug(
        "shard start not aligned",
        "deepspeedai/DeepSpeed#1328",
        "deepspeedai/DeepSpeed#1564",
        test=PARTITIONS + "[odd shards]",
    ),
    "G29": bug(
        "shared weights: gradient in two places",
        "NVIDIA/Megatron-LM@a96650b9",
        waits_for="gradients fused into backward",
    ),
    "G31": bug(
        "prescale factor applied on one side only",
        "deepspeedai/DeepSpeed#8232",
        waits_for="an engine",
    ),
    "G32": bug(
        "group size 1 switches synchronisation off",
        "verl-project/verl#7493",
        test=RANKS + "[group of one]",
    ),
    "G34": bug(
        "sharing one CPU buffer between groups",
        "deepspeedai/DeepSpeed#7905",
        "deepspeedai/DeepSpeed#7906",
        waits_for="CPU offload",
    ),
    "H01": bug("step lost in elastic checkpoints", "deepspeedai/DeepSpeed#4396"),
    "H02": bug(
        "alignment differs between save and load",
        "deepspeedai/DeepSpeed#5105",
        test=PARTITIONS + "[alignment differs on load]",
    ),
    "H04": bug("key written under one name, read under another", "NVIDIA/apex#704"),
    "H05": bug(
        "wrapper not refreshed after inner load",
        "NVIDIA/Megatron-LM@1505db4c",
        "NVIDIA/apex#766",
        "microsoft/rat-sql#45",
        test=WRAPPERS + "[EditsDeadGroups]",
    ),
    "H07": bug("substring name match", "NVIDIA/Megatron-LM#3569", test=NAMES),
    "H08": bug(
        "padding-stripped index against padded index",
        "NVIDIA/Megatron-LM#5077",
        waits_for="ZeroOptimizer",
    ),
    "H10": bug("step becomes a tensor after load", "hpcaitech/ColossalAI#6146"),
    "H11": bug(
        "state missing on load because it is created lazily",
        "deepspeedai/DeepSpeed#5211",
        "deepspeedai/DeepSpeed#5104",
    ),
    "H13": bug(
        "fp32 path called with mixed-precision arguments",
        "deepspeedai/DeepSpeed#289",
        waits_for="an engine",
    ),
    "H14": bug(
        "layout of stage-1 sub-partitions", "deepspeedai/DeepSpeed#531", waits_for="ZeroOptimizer"
    ),
    "H16": bug(
        "scheduler created after optimizer load resets lr",
        "torch-points3d/torch-points3d#630",
        "pytorch/pytorch#149942",
        "pytorch/pytorch#119168",
        test=SCHEDULES,
    ),
    "H17": bug(
        "quantised state has another shape than the param",
        "bitsandbytes-foundation/bitsandbytes#1840",
        waits_for="quantised state",
    ),
    "H19": bug(
        "min scale and clip not part of the state",
        DEEPSPEED,
        test=WRAPPERS + "[ClipsAsConstructed]",
    ),
    "H20": bug(
        "first all-gather spreads corrupted values",
        "NVIDIA/Megatron-LM@44b64805",
        test=PARTITIONS + "[gathered before the load]",
    ),
}
