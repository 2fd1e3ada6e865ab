"""Both sides say the same about compatibility, and each choice is off by default."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, asdict, fields

import pytest
import torch

import twinstep.fast.optimizers.fused_adam
import twinstep.reference.fused_adam
from twinstep.contract.compat import Compat
from twinstep.parity.proof.upstream.edge_rows import ROWS
from twinstep.reference.compat import count_each, count_shared

FIELDS = [field.name for field in fields(Compat)]


def test_correct_is_the_default() -> None:
    assert not any(asdict(Compat()).values())


def test_deepspeed_is_everything_but_the_early_growth() -> None:
    chosen = asdict(Compat.deepspeed())
    assert not chosen.pop("growth_counts_this_step")
    assert all(chosen.values())


def test_both_fused_adams_have_the_same_arguments() -> None:
    ours, theirs = (
        inspect.signature(kind.__init__).parameters
        for kind in (
            twinstep.reference.fused_adam.FusedAdam,
            twinstep.fast.optimizers.fused_adam.FusedAdam,
        )
    )
    assert list(ours) == list(theirs)
    for name in set(ours) - {"self", "params", "compat"}:
        assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_selected_by_an_edge_and_cites_it(name: str) -> None:
    ids = [row.id for row in ROWS if row.decision == f"compat:{name}"]
    assert ids
    text = inspect.getdoc(Compat) or ""
    assert all(i in text for i in ids)


def test_the_record_is_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(Compat(), FIELDS[0], True)
    constructor: type = Compat
    with pytest.raises(TypeError):
        constructor(True)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def test_counting_each_advances_everyone() -> None:
    counts = count_each([4, 0], [HALF, SINGLE])
    assert (counts.used, counts.stored) == ([5, 1], [5, 1])


def test_counting_shared_advances_the_last_once_for_each_dtype_in_order() -> None:
    counts = count_shared([7, 7, 7, 2], [SINGLE, HALF, BRAIN, HALF])
    assert counts.stored == [7, 7, 7, 5]
    assert counts.used == [5, 3, 4, 3]
    assert count_shared([], []).used == []
