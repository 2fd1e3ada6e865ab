"""Real defects of the checks themselves (J): each is a test of this judge."""

from __future__ import annotations

from twinstep.parity.proof.corpus.bug import CHECKS, DEEPSPEED, Bug, bug

ROWS: dict[str, Bug] = {
    "J01": bug(
        "parity of norms with 1 % of the norm as tolerance",
        DEEPSPEED,
        test=CHECKS + "test_tolerance_cannot_hide_a_step_that_does_nothing",
    ),
    "J02": bug(
        "awkward size commented out", DEEPSPEED, test=CHECKS + "test_sizes_cannot_shrink_unseen"
    ),
    "J03": bug(
        "only the default hyper-parameters tested",
        "bitsandbytes-foundation/bitsandbytes#1993",
        test=CHECKS + "test_no_customary_default_goes_unnoticed",
    ),
    "J04": bug(
        "absolute tolerance above the signal",
        "ScalingIntelligence/KernelBench#165",
        test=CHECKS + "test_zeros_are_no_answer_to_tiny_values",
    ),
    "J05": bug(
        "reference output's memory handed to the kernel",
        "ScalingIntelligence/KernelBench#82",
        "meta-pytorch/tritonbench#409",
        test=CHECKS + "test_outputs_hold_no_result_before_the_call",
    ),
    "J06": bug(
        "generator consumed before the test loop",
        "meta-pytorch/BackendBench#106",
        test=CHECKS + "test_nothing_run_is_not_green",
    ),
    "J07": bug(
        "the reference was wrong",
        "pytorch/FBGEMM#5908",
        test=CHECKS + "test_reference_agrees_with_two_independent_oracles",
    ),
    "J08": bug(
        "tolerance widened to turn a run green",
        "huggingface/transformers#41925",
        test=CHECKS + "test_no_number_of_the_user_widens_a_bound",
    ),
    "J09": bug(
        "the float32 case ran in float64",
        "intel/intel-xpu-backend-for-triton#7526",
        test=CHECKS + "test_kernel_gets_the_dtypes_that_the_cell_names",
    ),
    "J10": bug(
        "only param groups compared after resume",
        "deepspeedai/DeepSpeed#5105",
        test=CHECKS + "test_every_written_tensor_is_compared",
    ),
    "J11": bug(
        "formula oracle instead of the native op",
        "flagos-ai/FlagGems#5917",
        test=CHECKS + "test_reference_has_the_whole_signature",
    ),
}
