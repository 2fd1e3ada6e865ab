"""The reference's bits on fixed inputs: a torch that moves one is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from twinstep.golden.digests import FILE, Digests, from_text, read, to_text
from twinstep.parity.proof.gates.digests import computed, digest, drift, main


def test_the_reference_has_the_recorded_bits() -> None:
    assert drift(read()) == []


def test_every_operation_on_data_has_a_digest() -> None:
    recorded = {name.split()[0] for name in read().digests}
    steps = {"adam_step", "adamw_step", "lamb_step", "apex_lamb_step", "sgd_step", "mixed_step"}
    steps |= {"adamw_remainder_step"}
    buffers = {"unscale", "global_norm", "clip_factor", "accumulate", "cast_copy", "flatten"}
    assert recorded == steps | buffers


def test_drift_names_the_case_and_both_versions_of_torch() -> None:
    recorded = replace(read(), torch="1.0")
    moved = dict(recorded.digests)
    moved["adam_step bf16 moderate"] = "0" * 64
    moved["lamb_step fp32"] = moved.pop("unscale fp16 anything")
    said = drift(replace(recorded, digests=moved))
    here = torch.__version__
    assert said == [
        "adam_step bf16 moderate has other bits than recorded: "
        f"torch 1.0 recorded it, this is torch {here}",
        "lamb_step fp32 is recorded, but no longer computed",
        "unscale fp16 anything is computed, but not recorded",
    ]


def test_digest_sees_one_bit_the_sign_of_zero_and_the_dtype() -> None:
    base = torch.tensor([0.0, 1.0])
    others = [
        torch.tensor([-0.0, 1.0]),
        torch.tensor([0.0, 1.0 + 2.0**-23]),
        base.half(),
        base.reshape(2, 1),
        torch.tensor([1.0, 0.0]),
    ]
    assert len({digest([t]) for t in (base, *others)}) == 6
    assert digest([base]) == digest([[base.clone()]])


def test_digest_does_not_see_the_payload_of_a_nan() -> None:
    nans = [torch.tensor([x], dtype=torch.int32).view(torch.float32) for x in (0x7FC00000, -1)]
    assert digest([nans[0]]) == digest([nans[1]])


def test_digests_repeat() -> None:
    assert computed() == computed()


def test_the_file_is_read_back_as_it_was_written() -> None:
    assert to_text(read()) == FILE.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 0}'])
def test_a_file_that_holds_no_digests_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="here should"):
        from_text(text, "here")


def test_the_command_tells_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "all digests are as recorded" in capsys.readouterr().out
    assert main(["--everything"]) == 2
    assert "usage: python -m twinstep.parity.proof.gates.digests" in capsys.readouterr().err


def test_an_empty_record_is_drift() -> None:
    assert len(drift(Digests(torch="1.0", digests={}))) == len(computed())
