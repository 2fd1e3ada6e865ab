"""Compatibility with upstream: one frozen record, each choice off by default and cited."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from twinstep.contract.compat import Compat
from twinstep.parity.proof.upstream.edge_rows import ROWS

FIELDS = [field.name for field in fields(Compat)]


def test_correct_is_the_default() -> None:
    assert not any(asdict(Compat()).values())


def test_deepspeed_is_everything_but_the_early_growth() -> None:
    chosen = asdict(Compat.deepspeed())
    assert not chosen.pop("growth_counts_this_step")
    assert all(chosen.values())


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
