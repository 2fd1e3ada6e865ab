"""Messages between the judge and a kernel's process: what they carry, and what none can make."""

from __future__ import annotations

import pickle

import pytest
import torch

from twinstep.parity.cases.case import Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.laws.call import Call
from twinstep.parity.operations.table import operation_named
from twinstep.parity.runner.calls.messages import packed, unpacked


def test_a_call_arrives_whole() -> None:
    recipe = Recipe(layout="list", sizes=(3, 0, 5), seed=1)
    case = generate(operation_named("accumulate", "test"), "bf16", recipe)
    kind, found = unpacked(packed(("call", Call(case=case))))
    assert kind == "call"
    assert found.case.recipe == recipe
    for got, want in zip(found.case.lists["grads"], case.lists["grads"], strict=True):
        assert torch.equal(got, want)
        assert got.data_ptr() != want.data_ptr() or want.numel() == 0


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("subprocess", "Popen"),
        ("twinstep.parity.records.standalone", "subprocess.Popen"),
        ("twinstep.parity.records.standalone", "Path"),
        ("twinstep.parity.runner.calls.messages", "operation_named.__globals__"),
        ("torch.storage", "_load_from_bytes"),
    ],
)
def test_a_forged_reply_cannot_reach_beyond_the_classes_of_messages(module: str, name: str) -> None:
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
    with pytest.raises(pickle.UnpicklingError, match="is no part of a message"):
        unpacked(b"\x80\x04" + b"".join(words) + b"\x93.")
