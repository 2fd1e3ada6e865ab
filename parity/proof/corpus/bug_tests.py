"""Tests that plant real defects in whole optimizers and demand that each is noticed, by node id."""

from __future__ import annotations

# Several ranks of the FP16 optimizers: who adds up what, and who is told.
RANKS = "tests/fast/test_fast_fp16_mistakes.py::test_a_mistake_about_ranks_is_noticed"
COPIES = (
    "tests/fast/test_fast_fp16_mistakes.py"
    "::test_experts_that_are_added_over_their_copies_are_noticed"
)
MESSAGES = "tests/fast/test_fast_fp16_messages.py::test_a_rank_that_takes_no_part_is_noticed"
# Masters of BF16Optimizer that are split over ranks.
PARTITIONS = "tests/fast/test_fast_bf16_mistakes.py::test_a_mistake_about_partitions_is_noticed"
# Sequences of actions on one optimizer.
WRAPPERS = "tests/parity/test_parity_twins_fp16.py::test_a_wrong_optimizer_is_rejected"
# Checkpoints and training runs.
NAMES = "tests/contract/test_checkpoints_names.py::test_a_name_found_inside_another_is_noticed"
SCHEDULES = (
    "tests/scenarios/test_scenarios_optimizers.py::test_a_schedule_made_after_the_load_is_noticed"
)
