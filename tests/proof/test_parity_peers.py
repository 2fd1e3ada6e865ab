"""Laws of the peers: what was observed is explained, and the page says what was observed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinstep.parity.operations.table import operation_named
from twinstep.parity.proof.peers.findings import FINDINGS, idle, unexplained
from twinstep.parity.proof.peers.observe import Observation, observed
from twinstep.parity.proof.peers.page import FILE, page
from twinstep.parity.proof.peers.peer import Peer, pinned_to
from twinstep.parity.proof.peers.record import recorded
from twinstep.parity.proof.peers.shelves import peers
from twinstep.parity.records.errors import UsageError

QUICK = ("torch_update_scale", "torch_clip")


def named(name: str) -> Peer:
    return next(peer for peer in peers() if peer.name == name)


def test_every_broken_law_on_record_is_explained_and_every_finding_shows() -> None:
    _, seen, _ = recorded()
    assert unexplained(seen) == []
    assert idle(seen) == []
    kinds = {finding.kind for finding in FINDINGS}
    assert kinds == {"another contract", "less accurate", "a bug"}


def test_every_peer_is_on_record_or_missing_with_a_reason() -> None:
    _, seen, missing = recorded()
    assert {one.peer for one in seen} | set(missing) == {peer.name for peer in peers()}
    assert all(missing.values())


def test_an_unknown_fault_and_a_finding_that_is_gone_are_reported() -> None:
    strange = Observation(peer="torch_clip", dtype="scalar", broken={"value": "something"})
    assert unexplained([strange]) == []
    (sentence,) = unexplained([replace(strange, peer="torch_update_scale")])
    assert "torch_update_scale [scalar] breaks `value`" in sentence
    (sentence,) = idle([replace(strange, broken={})])
    assert "torch_clip no longer shows: max_norm = 0" in sentence


def test_the_page_is_what_the_record_says() -> None:
    assert page() == FILE.read_text()


def test_pinning_leaves_nothing_else_to_draw() -> None:
    step = operation_named("adamw_step", "test")
    narrow = pinned_to(step, {"factor": (1.0,), "bias_correction": (True,)})
    factor = next(row for row in narrow.controls if row.name == "factor")
    assert (factor.values, factor.range) == ((1.0,), None)
    assert next(row for row in narrow.options if row.name == "bias_correction").choices == (True,)
    assert [row.name for row in narrow.controls] == [row.name for row in step.controls]
    with pytest.raises(KeyError, match="adamw_step has no rule to pin"):
        pinned_to(step, {"rule": ("dynamic",)})


def test_torch_is_judged_as_recorded() -> None:
    _, seen, _ = recorded()
    before = {one.peer: one for one in seen if one.peer in QUICK}
    after = {one.peer: one for one in observed([named(name) for name in QUICK])}
    assert {name: set(one.broken) for name, one in after.items()} == {
        name: set(one.broken) for name, one in before.items()
    }


def test_a_peer_that_is_not_installed_is_left_out_with_a_reason() -> None:
    absent = replace(named("torch_clip"), package="no-such-distribution")
    assert absent.missing() == "no-such-distribution is not installed"
    assert observed([absent]) == []


def test_an_unknown_package_is_refused() -> None:
    with pytest.raises(UsageError, match='--package "apex" is unknown'):
        peers("apex")
