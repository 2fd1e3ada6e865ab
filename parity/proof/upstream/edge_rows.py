"""The rows of the edge table, as data. `parity.proof.upstream.edges` says what a row means and checks them."""

from __future__ import annotations

from twinstep.parity.proof.upstream.edge import Edge, proved, waits
from twinstep.parity.proof.upstream.edge_rows_checkpoints import CHECKPOINT_ROWS
from twinstep.parity.proof.upstream.edge_rows_wrappers import WRAPPER_ROWS

ZERO = "ZeroOptimizer"
PARTITION = "partition"
UNSCALE, GROWTH = "compat:unscale_with_updated_scale", "compat:growth_counts_this_step"
EXTERNAL, EXPERTS_OUT = "compat:external_scale_stays", "compat:clip_without_experts"
COUNTER, MOMENTS = "compat:shared_step_counter", "compat:moments_in_param_dtype"

LOSS_SCALING = (
    proved(
        "LS-1",
        "The step on which the scale grows divides by the grown scale: half a gradient is applied",
        UNSCALE,
        "A step is unscaled with the scale that its gradients were made with (0.19.8 on record).",
        "reference_mixed_step::compat_halves_the_gradient_of_a_growth_step",
    ),
    proved(
        "LS-2",
        "An external loss scale multiplies the loss, but is not divided out",
        EXTERNAL,
        "What multiplied the loss divides the gradients.",
        "reference_fp16_optimizer::an_external_scale_is_divided_out",
    ),
    proved(
        "LS-3",
        "The scaler's own overflow test raises TypeError",
        "correct",
        "There is one overflow test, and it works.",
        "reference_overflow::any_nonfinite_sees_one_bad_element",
    ),
    proved(
        "LS-4",
        "0.14 let the scale grow one step earlier than 0.19",
        GROWTH,
        "0.19's cadence is the default, 0.14's is a field.",
        "reference_mixed_step::compat_grows_with_the_window_and_not_after_it",
    ),
    proved(
        "LS-5",
        "Hysteresis 0 never lets the scale shrink",
        "same",
        "The rule is total, and a budget of 0 has no last overflow; pinned by a recorded trace.",
        "reference_loss_scale::an_empty_budget_never_shrinks",
    ),
    proved(
        "LS-6",
        "Shrinking does not refill hysteresis",
        "same",
        "Overflows in a row are one event; the budget returns when the scale grows.",
        "reference_loss_scale::shrinking_does_not_refill_hysteresis_and_growth_does",
    ),
    proved(
        "LS-7",
        "The floor is tested by equality: a scale below it is raised to it, without an error",
        "same",
        "Being below the floor says that somebody set the scale, not that training cannot go on.",
        "reference_loss_scale::a_scale_below_the_floor_is_raised_to_it",
    ),
    proved(
        "LS-8",
        "The error at the floor leaves the counters, so that a second call raises again",
        "same",
        "An error that changed nothing can be retried.",
        "reference_loss_scale::overflow_at_the_floor_is_an_error_and_changes_nothing",
    ),
    proved(
        "LS-9",
        "The error at the floor comes on all ranks at once, because the overflow flag is reduced",
        "same",
        "Every rank sees the same flag and raises.",
        "fast_fp16_ranks::the_error_at_the_floor_comes_on_all_ranks_at_once",
    ),
    proved(
        "LS-10",
        "Log text cuts scales to integers: 0.5 prints as 0, infinity crashes",
        "correct",
        "A message shows the scale as it is.",
        "reference_loss_scale::the_error_shows_a_fractional_scale",
    ),
    proved(
        "LS-11",
        "In 0.14 assigning the loss scale raises AttributeError",
        "correct",
        "Assigning sets the scale, as 0.19 does.",
        "reference_fp16_optimizer::assigning_the_loss_scale_sets_it",
    ),
    proved(
        "LS-12",
        "A dynamic checkpoint in a static optimizer has no floor: the next overflow raises",
        "correct",
        "The rule comes from the constructor, a state of another rule is refused.",
        "reference_scalers::what_does_not_fit_is_refused_and_changes_nothing",
    ),
    proved(
        "LS-13",
        "The floor is never in a checkpoint",
        "same",
        "Constants belong to the constructor.",
        "reference_scalers::constants_are_not_in_the_state",
    ),
    proved(
        "LS-14",
        "A half-precision loss with scale 65536 or more overflows at every step",
        "correct",
        "The loss goes to fp32 before it is multiplied; the limit of an fp16 loss is documented.",
        "reference_fp16_optimizer::an_fp16_loss_is_scaled_in_fp32_and_limited_by_its_own_cast",
    ),
    waits(
        "LS-15",
        "ZeRO multiplies the loss in the loss's own dtype, 0.14 in fp32",
        "correct",
        "The loss is multiplied in fp32.",
        ZERO,
    ),
    proved(
        "LS-16",
        "In 0.14 the scale starts as a Python integer and becomes a float when it shrinks",
        "correct",
        "A scale is a float64 from the start.",
        "reference_update_scale::scales_are_float64_and_counters_int64",
    ),
)

OVERFLOW = (
    proved(
        "OV-1",
        "Earlier versions tested the sum: finite gradients with an infinite sum overflowed",
        "same",
        "0.19.8 looks at every element, and so do we.",
        "reference_overflow::finite_gradients_with_an_infinite_sum_are_no_overflow",
    ),
    proved(
        "OV-2",
        "+inf and -inf together are an overflow",
        "same",
        "Each is one by itself.",
        "reference_overflow::opposite_infinities_are_an_overflow",
    ),
    proved(
        "OV-3",
        "Checking an empty list raises TypeError",
        "correct",
        "No gradients, no overflow.",
        "reference_overflow::nothing_is_no_overflow",
    ),
    proved(
        "OV-4",
        "The check by norm does a world reduction and a barrier at every step",
        "correct",
        "The reduction is the synchronisation; a barrier adds nothing.",
        "reference_bf16_ranks::the_world_size_does_not_matter",
    ),
    proved(
        "OV-5",
        "Which parameters are checked and whether experts exist are read from different lists",
        "same",
        "Parameters without gradients cannot overflow; experts exist on all ranks or on none.",
        "reference_norms::an_overflow_on_one_rank_skips_the_step_on_all",
    ),
    waits(
        "OV-6",
        "A step before any backward pass raises KeyError, a second step TypeError",
        "correct",
        "A step without gradients is refused in one sentence.",
        ZERO,
    ),
    waits(
        "OV-7",
        "ZeRO 0.14 with bf16 or fp32 never looks for NaN",
        "correct",
        "Non-finite gradients skip the step in every dtype.",
        ZERO,
    ),
    waits(
        "OV-8",
        "With the check switched off the overflow flag keeps its old value",
        "correct",
        "The flag speaks of the last step; without a check it is False.",
        ZERO,
    ),
)

NORMS = (
    proved(
        "NM-1",
        "Earlier versions turned a non-finite norm into -1, and -1 squared into a norm of 1",
        "same",
        "A non-finite norm stays non-finite, as in 0.19.8.",
        "reference_clip::nonfinite_gradients_give_a_nonfinite_norm",
    ),
    proved(
        "NM-2",
        "Clipping with the norm -1 turns gradients around",
        "correct",
        "A clip coefficient is in [0, 1].",
        "reference_clip::clip_coefficient_never_turns_a_gradient_around",
    ),
    proved(
        "NM-3",
        "ZeRO 0.14 reports NaN for any non-finite norm and then does not clip",
        "correct",
        "An infinite norm is infinite, NaN is NaN, neither step is taken.",
        "reference_mixed_step::overflow_skips_the_step_bit_for_bit",
    ),
    proved(
        "NM-4",
        "ZeRO with a NaN norm makes every gradient NaN",
        "correct",
        "A NaN norm does not clip; the step is skipped anyway.",
        "reference_clip::a_nan_norm_does_not_clip",
    ),
    proved(
        "NM-5",
        "In 0.14 tensor-parallel ranks other than the first are missing from the norm",
        "correct",
        "Every element of the model counts once.",
        "reference_norms::every_element_of_a_model_over_two_ranks_counts_once",
    ),
    proved(
        "NM-6",
        "What is masked from the norm is decided once, from the gradients of the first step",
        "correct",
        "Masks come from the parameters, not from who had a gradient first.",
        "reference_norms::a_replica_that_first_has_a_gradient_late_is_still_counted_once",
    ),
    proved(
        "NM-7",
        "A first step that fails half-way appends the masks twice",
        "correct",
        "There are no masks: what counts follows from the parameters at every step.",
        "reference_norms::a_replica_that_first_has_a_gradient_late_is_still_counted_once",
    ),
    proved(
        "NM-8",
        "Unfused norms drop everything on tensor-parallel ranks other than the first",
        "correct",
        "Every element of the model counts once.",
        "reference_norms::every_element_of_a_model_over_two_ranks_counts_once",
    ),
    proved(
        "NM-9",
        "Earlier versions squared every norm before adding, L1 too",
        "same",
        "0.19.8 gives 7 for the L1 norm of (3, 4), and so do we.",
        "reference_norms::known_norms",
    ),
    proved(
        "NM-10",
        "Earlier versions computed the norm of experts from their weights",
        "same",
        "The gradient norm is computed from gradients, as 0.19.8 does.",
        "reference_moe::the_norm_of_experts_is_that_of_their_gradients",
    ),
    proved(
        "NM-11",
        "Scratch and graphs are cached by function name for the whole process",
        "correct",
        "A norm depends on its arguments alone.",
        "reference_clip::norm_does_not_depend_on_earlier_calls",
    ),
    proved(
        "NM-12",
        "The norm's last bits depend on where partial sums are added",
        "correct",
        "The sum is exact and rounded once, so that order and splitting cannot matter.",
        "reference_clip::norm_does_not_depend_on_order_or_splitting",
    ),
    proved(
        "NM-13",
        "The norm of no gradients raises",
        "correct",
        "It is 0.",
        "reference_clip::norm_of_nothing_is_zero",
    ),
)

MIXTURE = (
    proved(
        "ME-1",
        "An expert tensor above the size limit leaves an empty group before it",
        "correct",
        "No empty groups are made.",
        "reference_moe::no_group_of_experts_is_empty_or_too_large",
    ),
    proved(
        "ME-2",
        "Without a size limit, expert groups that received nothing are kept",
        "correct",
        "No empty groups are made.",
        "reference_moe::no_group_of_experts_is_empty_or_too_large",
    ),
    proved(
        "ME-3",
        "The unfused optimizer leaves expert gradients out of the clip norm",
        EXPERTS_OUT,
        "Every gradient counts.",
        "reference_fp16_unfused_optimizer::experts_count_in_the_norm_that_clips",
    ),
    proved(
        "ME-4",
        "The size of an expert group is read from a number in its name",
        "correct",
        "A name is a name: every group is given under it, and knows its own size.",
        "fast_fp16_ranks::experts_on_different_ranks_step_like_the_reference",
    ),
)

FUSED_ADAM = (
    proved(
        "FA-1",
        "Only the last parameter of a group counts steps, for all",
        COUNTER,
        "One integer counter per parameter, advanced when that parameter had a gradient.",
        "battery_adam::compat_shares_the_counter_of_the_last_parameter",
    ),
    proved(
        "FA-2",
        "That counter advances once for each dtype in the group",
        COUNTER,
        "Dtypes in one group share nothing.",
        "battery_adam::compat_advances_the_shared_counter_once_for_each_dtype",
    ),
    proved(
        "FA-3",
        "zero_grad takes no argument",
        "correct",
        "It takes torch's, and set_grad_none when nothing is given.",
        "battery_steps::set_grad_none_is_what_zero_grad_does_unless_told",
    ),
    proved(
        "FA-4",
        "The CPU build decouples weight decay whatever adam_w_mode says",
        "correct",
        "The mode is honoured everywhere.",
        "battery_adam::l2_mode_is_honoured_on_every_device",
    ),
    proved(
        "FA-5",
        "An empty tensor at the end of a list keeps its neighbours from being updated",
        "correct",
        "Empty tensors anywhere change nothing for others.",
        "battery_steps::empty_parameters_anywhere_change_nothing_for_others",
    ),
    proved(
        "FA-6",
        "Moments have the parameter's dtype: small fp16 gradients give a second moment of 0",
        MOMENTS,
        "Moments are fp32.",
        "battery_adam::compat_stores_moments_in_the_parameter_dtype_and_explodes",
    ),
    proved(
        "FA-7",
        "Every group carries a step of 0 that never moves",
        "correct",
        "Counters live with the parameters; a group has none.",
        "battery_adam::group_options_override_and_no_counter_is_kept_in_the_group",
    ),
    proved(
        "FA-8",
        "No hyper-parameter is checked",
        "correct",
        "A value that cannot train is refused, by name and range; negative decay is allowed.",
        "battery_refusals::a_bad_option_is_refused_in_one_sentence",
    ),
    proved(
        "FA-9",
        "The closure runs without gradients being enabled",
        "correct",
        "It runs with gradients enabled, as in torch.",
        "battery_steps::a_closure_runs_with_gradients_and_its_loss_comes_back",
    ),
)

ROWS: tuple[Edge, ...] = (
    *LOSS_SCALING,
    *OVERFLOW,
    *NORMS,
    *MIXTURE,
    *FUSED_ADAM,
    *WRAPPER_ROWS,
    *CHECKPOINT_ROWS,
)
