"""The control block: documented slots, and numbers that travel only when they change."""

import re

import pytest
import torch
from torch import Tensor

from twinstep.fast.runtime import control
from twinstep.fast.runtime.control import DEVICE, HOST, SLOTS, ControlBlock, word_of

CPU = torch.device("cpu")


def uploads(block: ControlBlock, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record what a block sends, as if its device were a GPU."""
    sent: list[list[int]] = []

    def send(words: list[int], target: Tensor) -> None:
        sent.append(words)
        target.copy_(torch.tensor(words))

    monkeypatch.setattr(block, "_send", send)
    return sent


def test_the_table_of_slots_is_the_layout() -> None:
    table = re.findall(r"^    (\d+) +(\w+) +(float64|float32|int64) ", control.__doc__ or "", re.M)
    names = {name: (int(slot), dtype) for slot, name, dtype in table}
    kinds = {name: str(dtype).removeprefix("torch.") for name, dtype in (HOST | DEVICE).items()}
    assert names == {name: (SLOTS[name], kinds[name]) for name in SLOTS}


@pytest.mark.parametrize("name", SLOTS)
def test_a_control_holds_its_value_in_its_dtype(name: str) -> None:
    value = 3.0 if name in ("norm", "found_inf", "factor") else 7
    block = ControlBlock(CPU, {name: value})
    assert block[name].item() == value
    assert block[name].shape == ()
    assert block[name].dtype == (HOST | DEVICE)[name]
    others = [block[other].item() for other in SLOTS if other != name]
    assert others == [0] * len(others)


def test_a_control_is_a_view_of_its_slot() -> None:
    block = ControlBlock(CPU, {})
    block["scale"].fill_(1024.0)
    assert block.block[SLOTS["scale"]].item() == word_of("scale", 1024.0)


def test_a_number_reaches_the_block_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ControlBlock(CPU, {"lr": 0.5})
    sent = uploads(block, monkeypatch)
    block.set("lr", 0.1)
    assert block["lr"].item() == 0.5
    block.sync_hyperparameters()
    assert block["lr"].item() == 0.1
    assert len(sent) == 1


def test_a_number_that_did_not_change_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ControlBlock(CPU, {"lr": 0.5, "beta1": 0.9})
    sent = uploads(block, monkeypatch)
    block.set("lr", 0.5)
    block.set("beta1", 0.9)
    block.sync_hyperparameters()
    block.sync_hyperparameters()
    assert sent == []


def test_what_the_step_writes_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ControlBlock(CPU, {"scale": 2.0, "lr": 0.5})
    sent = uploads(block, monkeypatch)
    block["scale"].fill_(64.0)
    block.set("lr", 0.25)
    block.sync_hyperparameters()
    assert block["scale"].item() == 64.0
    assert [len(words) for words in sent] == [len(HOST)]


def test_a_float64_tensor_is_used_where_it_lies() -> None:
    block = ControlBlock(CPU, {"lr": 0.5})
    lr = torch.tensor(0.1, dtype=torch.float64)
    block.set("lr", lr)
    lr.fill_(0.2)
    assert block["lr"].item() == 0.2


def test_another_tensor_is_converted_to_an_address_that_stays() -> None:
    block = ControlBlock(CPU, {"lr": 0.5})
    block.set("lr", torch.tensor(0.1))
    first = block["lr"].data_ptr()
    block.set("lr", torch.tensor(0.25, dtype=torch.bfloat16))
    assert block["lr"].item() == 0.25
    assert block["lr"].dtype == torch.float64
    assert block["lr"].data_ptr() == first


def test_a_number_after_a_tensor_counts_again() -> None:
    block, number = ControlBlock(CPU, {}), 0.5
    block.set("lr", number)
    block.set("lr", torch.tensor(0.1))
    block.set("lr", number)
    block.sync_hyperparameters()
    assert block["lr"].item() == 0.5


@pytest.mark.gpu
def test_the_ring_never_overwrites_a_copy_in_flight() -> None:
    block = ControlBlock(torch.device("cuda"), {})
    seen = []
    for step in range(50):
        block.set("lr", float(step))
        block.sync_hyperparameters()
        seen.append(block["lr"].clone())
    assert [value.item() for value in seen] == list(range(50))
