"""Rows of the edge table: LAMB and the mixed-precision optimizers."""

from __future__ import annotations

from twinstep.parity.proof.upstream.edge import out, proved

BUILT, UPDATED = "compat:step_at_construction", "compat:unscale_with_updated_scale"
EXTERNAL, REPORTED = "compat:external_scale_stays", "compat:report_scaled_norm"
OLD_MASTERS = "compat:keep_masters_on_load"


FUSED_LAMB = (
    proved(
        "LB-1",
        "A limit for the gradient's norm without the norms raises TypeError",
        "correct",
        "The norm that nobody gave is computed.",
        "battery_lamb::max_grad_norm_clips_each_gradient",
    ),
    proved(
        "LB-2",
        "A low-precision copy beside an fp32 gradient is never written",
        "correct",
        "A copy is written whatever the gradient is.",
        "reference_lamb::copies_are_written_whatever_the_gradient_is",
    ),
    proved(
        "LB-3",
        "An empty parameter launches a kernel without blocks",
        "correct",
        "It stays empty, and its step counts.",
        "reference_lamb::an_empty_tensor_stays_empty_and_counts_its_step",
    ),
    proved(
        "LB-4",
        "An empty list of gradients raises IndexError",
        "correct",
        "A list that is not as long as its group is refused in one sentence.",
        "battery_refusals::lamb_refuses_lists_of_another_length",
    ),
    proved(
        "LB-5",
        "Weight decay is scaled by the bias correction, since the step size carries it",
        "same",
        "This is the definition of this LAMB; another one is another optimizer.",
        "reference_lamb::decay_is_scaled_by_the_bias_correction",
    ),
    proved(
        "LB-6",
        "A NaN norm makes the tensor NaN",
        "same",
        "NaN is not hidden; the wrappers skip such a step.",
        "reference_lamb::a_nan_norm_makes_its_tensor_nan_and_no_other",
    ),
)

FLAT_FP16 = (
    proved(
        "FP-1",
        "Construction takes a step with zero gradients: masters decay, counters become 1",
        BUILT,
        "Construction changes nothing.",
        "reference_fp16_optimizer::compat_takes_a_step_at_construction",
    ),
    proved(
        "FP-2",
        "0.14 gave frozen parameters zero gradients, so that they decay",
        "same",
        "0.19.8 leaves frozen parameters out, and so do we.",
        "battery_steps::frozen_parameters_are_left_alone",
    ),
    proved(
        "FP-3",
        "A parameter without a gradient is treated as having a zero gradient",
        "same",
        "The master is one tensor: its moments and its decay move as a whole.",
        "battery_steps::a_missing_gradient_is_a_gradient_of_zero",
    ),
    proved(
        "FP-4",
        "Earlier versions applied a bf16 step that they reported as skipped",
        "same",
        "0.19.8 skips it, and so do we.",
        "reference_fp16_optimizer::a_bf16_step_with_a_non_finite_gradient_is_skipped",
    ),
    proved(
        "FP-5",
        "A closure is ignored without a word",
        "correct",
        "It is refused with the reason: it would run backward without the loss scale.",
        "battery_refusals::a_closure_and_a_later_group_are_refused_with_the_reason",
    ),
    proved(
        "FP-6",
        "The legacy flag cannot work with any bundled optimizer",
        "correct",
        "It is refused at construction.",
        "battery_refusals::a_bad_option_is_refused_in_one_sentence",
    ),
    out(
        "FP-7",
        "The error without an accelerator shows an unformatted placeholder",
        "The reference needs no accelerator.",
    ),
    proved(
        "FP-8",
        "state_dict holds live tensors: a later step changes what is to be saved",
        "correct",
        "It holds copies.",
        "checkpoints_resume::a_state_dict_is_a_copy",
    ),
    proved(
        "FP-9",
        "On a growth step the reported norm is divided by the grown scale",
        UPDATED,
        "The norm is that of the true gradients.",
        "reference_fp16_optimizer::compat_halves_gradient_and_norm_of_a_growth_step",
    ),
    proved(
        "FP-10",
        "Under the engine the loss of this class is never multiplied by the scale",
        "correct",
        "backward() multiplies by what step() divides by.",
        "reference_fp16_optimizer::assigning_the_loss_scale_sets_it",
    ),
    proved(
        "FP-11",
        "0.14 passes no timers for a static scale, and the step raises TypeError",
        "correct",
        "Timers are optional.",
        "reference_fp16_optimizer::a_growth_step_applies_the_whole_gradient",
    ),
    proved(
        "FP-12",
        "An external loss scale is not divided out",
        EXTERNAL,
        "What multiplied the loss divides the gradients.",
        "reference_fp16_optimizer::an_external_scale_is_divided_out",
    ),
    proved(
        "FP-13",
        "A step without any gradient succeeds with norm 0",
        "same",
        "It is the step of a model whose gradients are all missing, which FP-3 defines.",
        "battery_steps::a_missing_gradient_is_a_gradient_of_zero",
    ),
)

UNFUSED_FP16 = (
    proved(
        "UF-1",
        "The reported norm is still multiplied by the loss scale",
        REPORTED,
        "The norm is that of the true gradients, as in the flat optimizer.",
        "reference_fp16_unfused_optimizer::the_reported_norm_is_that_of_the_true_gradients",
    ),
    proved(
        "UF-2",
        "Earlier versions left non-finite gradients in place after an overflow",
        "same",
        "0.19.8 drops them, and so do we.",
        "reference_fp16_unfused_optimizer::overflow_skips_the_step_and_drops_gradients",
    ),
    proved(
        "UF-3",
        "A bf16 overflow skips the step, while the flat optimizer once applied it",
        "same",
        "Both skip.",
        "reference_fp16_unfused_optimizer::overflow_skips_the_step_and_drops_gradients",
    ),
    proved(
        "UF-4",
        "With a static scale an overflow skips the step and keeps the scale",
        "same",
        "A static scale never moves.",
        "reference_fp16_unfused_optimizer::overflow_skips_the_step_and_drops_gradients",
    ),
    proved(
        "UF-5",
        "Construction takes a step with zero gradients, which LAMB's decay makes large",
        BUILT,
        "Construction changes nothing.",
        "reference_fp16_unfused_optimizer::compat_takes_a_step_at_construction",
    ),
    proved(
        "UF-6",
        "The clip norm is not in a checkpoint",
        "correct",
        "It is saved, as in the flat optimizer; a checkpoint without it keeps the constructor's.",
        "checkpoints_formats::whole_scales_and_no_clip_norm_are_taken",
    ),
    proved(
        "UF-7",
        "The LAMB path drops all gradients of tensor-parallel ranks other than the first",
        "correct",
        "Every element of the model counts once.",
        "reference_norms::every_element_of_a_model_over_two_ranks_counts_once",
    ),
    out(
        "UF-8",
        "The engine gives every optimizer but FusedAdam to this wrapper",
        "There is no engine here: whoever builds a wrapper chooses it.",
    ),
    proved(
        "UF-9",
        "Gradients stay after a step",
        "same",
        "The caller drops them; the flat optimizer, whose gradients were moved, drops its own.",
        "reference_fp16_unfused_optimizer::gradients_stay_after_a_step",
    ),
)

BF16 = (
    proved(
        "BF-1",
        "Earlier versions aborted on a zero norm and on a non-finite one",
        "same",
        "0.19.8 takes the step with norm 0 and skips the non-finite one, and so do we.",
        "reference_bf16_optimizer::zero_gradients_and_none_at_all_are_a_step",
    ),
    proved(
        "BF-2",
        "In 0.14 bf16 accumulation never updates anything",
        "same",
        "0.19.8 hands the accumulated gradient over, and so do we.",
        "reference_bf16_optimizer::bf16_accumulation_loses_what_fp32_keeps",
    ),
    proved(
        "BF-3",
        "In 0.14 clearing the gradients while accumulating raises AttributeError",
        "correct",
        "They are cleared.",
        "reference_bf16_optimizer::gradients_can_be_kept_or_cleared",
    ),
    proved(
        "BF-4",
        "In 0.14 masters are restored with the partition number of another group",
        "correct",
        "Each group has its own ranks and its own partition.",
        "reference_bf16_ranks::each_group_has_its_own_ranks",
    ),
    proved(
        "BF-5",
        "Loading without fp32 weights keeps old masters, which then overwrite the loaded model",
        OLD_MASTERS,
        "Masters come from the model weights.",
        "reference_bf16_ranks::without_saved_masters_they_come_from_the_model_weights",
    ),
    out(
        "BF-6",
        "The engine sums fp32 gradients in bf16",
        "Reduction is the caller's; get_grads_for_reduction gives the accumulators in their dtype.",
    ),
    proved(
        "BF-7",
        "Padding is recorded on the last rank alone, although it can reach over several",
        "correct",
        "Every rank records the padding inside its own partition.",
        "reference_bf16_ranks::every_rank_records_its_own_padding",
    ),
    proved(
        "BF-8",
        "The whole gradient of a parameter is looked up by the wrong index on later ranks",
        "correct",
        "It is found by the parameter's name.",
        "reference_bf16_ranks::a_whole_gradient_is_the_accumulated_one_on_every_rank",
    ),
    proved(
        "BF-9",
        "backward(loss) raises TypeError",
        "correct",
        "It runs backward and accumulates.",
        "reference_bf16_optimizer::backward_accumulates_until_the_step",
    ),
    out(
        "BF-10",
        "Graph harvesting and dropping gradients exclude one another",
        "The reference captures no graphs.",
    ),
    proved(
        "BF-11",
        "A parameter without a gradient has a zero gradient, and does not count in the norm",
        "same",
        "Zeros add nothing to a norm.",
        "reference_bf16_optimizer::a_parameter_without_gradient_has_a_zero_gradient",
    ),
    proved(
        "BF-12",
        "With immediate updates, gradients that are not cleared between two passes count twice",
        "correct",
        "What was accumulated is cleared at once, so that it cannot count again.",
        "reference_bf16_optimizer::immediate_updates_count_raw_backward_passes_once",
    ),
    proved(
        "BF-13",
        "A single aligned tensor is not copied: the flat buffer is its own memory",
        "correct",
        "A flat buffer is always new memory.",
        "reference_bf16_optimizer::a_flat_buffer_is_always_new_memory",
    ),
    proved(
        "BF-14",
        "In 0.14 a universal checkpoint needs a model-parallel unit",
        "correct",
        "Without one there is one model-parallel rank.",
        "golden_checkpoints::a_universal_checkpoint_is_loaded_before_any_step",
    ),
    proved(
        "BF-15",
        "Memory and debug lines are printed at construction and at loading",
        "correct",
        "Nothing is printed; memory_report() is there for who asks.",
        "reference_bf16_optimizer::nothing_is_printed",
    ),
    proved(
        "BF-16",
        "A checkpoint has no zero_stage, and the consolidation script refuses it",
        "same",
        "The keys are those of DeepSpeed's own class.",
        "reference_bf16_ranks::keys_are_those_of_deepspeed",
    ),
)

WRAPPER_ROWS = (*FUSED_LAMB, *FLAT_FP16, *UNFUSED_FP16, *BF16)
