"""Rows of the edge table: fragments of flat buffers, checkpoints, the engine."""

from __future__ import annotations

from twinstep.parity.proof.upstream.edge import out, proved, waits

ZERO = "ZeroOptimizer"

FRAGMENTS = (
    out(
        "TF-1",
        "The whole gradient of a parameter is the local one while there is a local one",
        "A parameter's own .grad is torch's; get_full_hp_grad always gives the accumulated one.",
    ),
    waits(
        "TF-2",
        "Gradients that are handed out are still multiplied by the loss scale",
        "same",
        "They are what is stored, as documented.",
        ZERO,
    ),
    proved(
        "TF-3",
        "After loading a universal checkpoint the fp32 weight was one of the moments until 0.19.6",
        "same",
        "0.19.8 keeps weights and moments apart, and so do we: loading re-points nothing.",
        "golden_checkpoints::weights_and_moments_stay_apart_after_loading",
    ),
    proved(
        "TF-4",
        "Which moment that was depended on the order of a set",
        "same",
        "See TF-3: loading re-points nothing.",
        "golden_checkpoints::weights_and_moments_stay_apart_after_loading",
    ),
    proved(
        "TF-5",
        "A gradient as long as its parameter is summed once for each rank that owns a piece",
        "correct",
        "Accumulators are whole on every rank, and nothing is summed.",
        "reference_bf16_ranks::a_whole_gradient_is_the_accumulated_one_on_every_rank",
    ),
    proved(
        "TF-6",
        "A missing state raises on owners while other ranks wait for ever",
        "correct",
        "Every rank knows which state there is, and all raise.",
        "reference_bf16_ranks::a_missing_state_is_an_error_on_every_rank",
    ),
    waits(
        "TF-7",
        "Round-robin order and fragments disagree",
        "correct",
        "Fragments follow the order in which parameters lie.",
        ZERO,
    ),
    out(
        "TF-8",
        "Linking counts in integers, membership in floats",
        "Everything here counts in integers.",
    ),
    proved(
        "TF-9",
        "Earlier versions failed on an empty parameter inside a partition",
        "same",
        "0.19.8 accepts it, and so do we.",
        "reference_bf16_optimizer::empty_and_frozen_parameters_are_fine",
    ),
)

CHECKPOINTS = (
    proved(
        "CK-1",
        "The scaler in a checkpoint replaces the configured one, constants, class and all",
        "correct",
        "Constants and rule come from the constructor; a state of another rule is refused.",
        "reference_scalers::states_of_different_rules_do_not_mix",
    ),
    proved(
        "CK-2",
        "A pickled scaler needs unrestricted unpickling",
        "correct",
        "A state is tensors and plain values; torch.load(weights_only=True) reads it.",
        "checkpoints_resume::a_file_is_read_whole_or_refused",
    ),
    waits(
        "CK-3",
        "Elastic loading works only with optimizers that count steps in their groups",
        "correct",
        "Counters live with the masters.",
        ZERO,
    ),
    waits(
        "CK-4",
        "Elastic loading with round robin gives parameters each other's values",
        "correct",
        "Partitions are addressed by name.",
        ZERO,
    ),
    waits(
        "CK-5",
        "In 0.14 padding over several ranks ends up inside elastic checkpoints",
        "correct",
        "Every rank cuts its own padding off.",
        ZERO,
    ),
    out(
        "CK-6",
        "The engine refuses another number of ranks even for elastic checkpoints",
        "There is no engine here.",
    ),
    proved(
        "CK-7",
        "In 0.14 a universal checkpoint cannot be loaded before the first step",
        "correct",
        "State is made from what the checkpoint holds.",
        "golden_checkpoints::a_universal_checkpoint_is_loaded_before_any_step",
    ),
    proved(
        "CK-8",
        "A rank that owns only padding fails to load a universal checkpoint",
        "correct",
        "It takes the step from the checkpoint like every other rank.",
        "golden_checkpoints::ranks_that_own_only_padding_load_too",
    ),
    waits(
        "CK-9",
        "Converting a round-robin checkpoint permutes weights",
        "correct",
        "Partitions are addressed by name.",
        ZERO,
    ),
    proved(
        "CK-10",
        "Stray files whose name ends like a state's are read as state",
        "correct",
        "Only files whose name ends in .pt are read.",
        "golden_checkpoints::stray_files_are_not_read",
    ),
    out(
        "CK-11",
        "Shards with another prefix are never looked for",
        "File names of shards are the engine's.",
    ),
    proved(
        "CK-12",
        "A saved partition that is too long raises, a short one is extended with zeros",
        "same",
        "Zeros behind the end are padding; too much is something else.",
        "reference_bf16_ranks::a_short_partition_is_extended_and_a_long_one_is_refused",
    ),
    out("CK-13", "Cross-reference to BF-5, BF-7 and BF-16", "Decided there."),
    waits(
        "CK-14",
        "Missing states are made in fp32 whatever the masters are",
        "same",
        "State is fp32.",
        ZERO,
    ),
    proved(
        "CK-15",
        "After loading a universal checkpoint fragments pointed at the wrong buffers until 0.19.6",
        "same",
        "See TF-3: loading re-points nothing.",
        "golden_checkpoints::weights_and_moments_stay_apart_after_loading",
    ),
    proved(
        "CK-16",
        "In 0.14 a universal checkpoint needs an iteration from the caller",
        "correct",
        "The step is in the checkpoint; without one it is 0.",
        "golden_checkpoints::a_universal_checkpoint_is_loaded_before_any_step",
    ),
)

ENGINE = (
    proved(
        "EN-1",
        "Without ZeRO the engine never multiplies an fp16 loss by the scale, but divides by it",
        "correct",
        "backward() multiplies by what step() divides by.",
        "reference_fp16_optimizer::assigning_the_loss_scale_sets_it",
    ),
    proved(
        "EN-2",
        "optimizer.backward(loss) raises TypeError for bf16 and ZeRO",
        "correct",
        "It runs backward.",
        "reference_bf16_optimizer::backward_accumulates_until_the_step",
    ),
    out("EN-3", "Skipped steps advance the engine's step counter", "There is no engine here."),
    out(
        "EN-4",
        "The default clip norm changed from 0 to 1",
        "That is the engine's default; here nothing is clipped unless told.",
    ),
    out(
        "EN-5",
        "The name Adam means decoupled weight decay",
        "Optimizers are built by class, not by name.",
    ),
    out(
        "EN-6",
        "In 0.14 defaults of the scale depend on which keys the user wrote",
        "Defaults are those of the constructor.",
    ),
)

CHECKPOINT_ROWS = (*FRAGMENTS, *CHECKPOINTS, *ENGINE)
