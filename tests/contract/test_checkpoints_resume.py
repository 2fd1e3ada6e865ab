"""Checkpoints of the mixed-precision classes: saved on either side, resumed on either side."""

from __future__ import annotations

import copy
import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import KINDS, plain, started
from tests.helpers.sides import SIDES
from twinstep.contract.checkpoint import read_checkpoint

pytestmark = pytest.mark.usefixtures("replay")
# The second step overflows; the fourth is the second clean one, so that the scale grows again.
OVERFLOWS = (1,)
LAST = 4


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.9)


BRAIN = {"low_precision_dtype": torch.bfloat16}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    **{f"{kind} in bf16": (kind, BRAIN) for kind in ("flat", "unfused")},
    **{f"{kind} around Adam": (kind, {"inside": torch.optim.Adam}) for kind in ("flat", "unfused")},
    **{f"{kind} around SGD": (kind, {"inside": momentum}) for kind in ("flat", "unfused")},
    "lamb legacy": ("lamb", {"fused_lamb_legacy": True}),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("cut", [0, 3])
def test_a_resumed_run_is_the_uninterrupted_one_whoever_saved_it(
    name: str, cut: int, tmp_path: Path
) -> None:
    """N steps are k steps, save, load and N - k steps, bit for bit, scale and counters included."""
    kind, options = RUNS[name]
    whole = started("reference", kind, **options)
    whole.train(range(LAST), OVERFLOWS)
    wanted = plain(whole.optimizer.state_dict())
    for saver in SIDES:
        first = started(saver, kind, **options)
        first.train(range(cut), OVERFLOWS)
        file = tmp_path / f"{saver}.pt"
        torch.save(first.optimizer.state_dict(), file)
        for loader in SIDES:
            second = started(loader, kind, **options, clip_grad=0.1)
            for param in second.params:
                param.data.fill_(7.0)
            second.load(read_checkpoint(file))
            for one, other in zip(first.params, second.params, strict=True):
                assert torch.equal(one, other), (saver, loader)
            second.train(range(cut, LAST), OVERFLOWS)
            assert plain(second.optimizer.state_dict()) == wanted, (saver, loader)
            assert list(second.optimizer.state_dict()) == list(whole.optimizer.state_dict())
            for one, other in zip(whole.params, second.params, strict=True):
                assert torch.equal(one, other), (saver, loader)


@pytest.mark.parametrize("kind", ["flat", "unfused"])
@pytest.mark.parametrize("side", SIDES)
def test_state_of_torchs_adam_goes_on_in_fused_adam(side: str, kind: str) -> None:
    """Options that the other optimizer does not know stay those of the constructor."""
    source, run = started(side, kind, torch.optim.AdamW), started(side, kind)
    source.train(range(2))
    run.load(source.optimizer.state_dict())
    run.train(range(2, 3))
    assert run.optimizer.param_groups[0]["bias_correction"] is True
    assert run.optimizer.state_dict()["cur_iter"] == 3


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("side", SIDES)
def test_a_state_dict_is_a_copy(side: str, name: str) -> None:
    """Edge FP-8: neither a later step nor one after loading writes into it.

    Torch's optimizers, by themselves, go on in the tensors that they load.
    """
    kind, options = RUNS[name]
    run = started(side, kind, **options)
    run.train(range(1))
    saved = run.optimizer.state_dict()
    before = plain(copy.deepcopy(saved))
    run.train(range(1, 2))
    assert plain(saved) == before
    run.load(saved)
    run.train(range(1, 2))
    assert plain(saved) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_a_state_before_the_first_step_is_loaded_too(side: str, kind: str) -> None:
    run, fresh = started(side, kind), started(side, kind)
    saved = fresh.optimizer.state_dict()
    run.train(range(1))
    run.load(saved)
    assert plain(run.optimizer.state_dict()) == plain(saved)
    assert not run.optimizer.state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", SIDES)
def test_state_of_another_optimizer_inside_may_be_left_out(side: str, kind: str) -> None:
    """Only masters, scale and clip norm are taken; what would not fit is not looked at."""
    source = started(side, kind)
    source.train(range(1))
    saved = source.optimizer.state_dict()
    key = "base_optimizer_state" if kind == "bf16" else "optimizer_state_dict"
    saved[key] = {"state": {0: {"momentum_buffer": torch.zeros(1)}}, "param_groups": []}
    run = started(side, kind)
    run.load(saved, load_optimizer_states=False)
    assert not run.optimizer.state
    if kind != "bf16":
        assert run.optimizer.loss_scale == source.optimizer.loss_scale
    for one, other in zip(source.params, run.params, strict=True):
        assert torch.equal(one, other)


def test_whatever_happens_to_a_file_is_one_short_sentence(tmp_path: Path) -> None:
    """Bytes changed, lost and put in, in both formats of torch; some leave a file that reads."""
    dice = random.Random(5)
    state = started("reference", "flat").optimizer.state_dict()
    contents = []
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save(state, stream, _use_new_zipfile_serialization=zipped)
        contents.append(stream.getvalue())
    said: list[str] = []
    for number in range(80):
        changed = bytearray(contents[number % 2])
        for _ in range(dice.choice((1, 2, 8))):
            at, by = dice.randrange(len(changed)), dice.randrange(1, 40)
            part = (b"", dice.randbytes(by), dice.randbytes(1))[number % 3]
            changed[at : at + (0 if number % 3 == 1 else by)] = part
        (tmp_path / "state.pt").write_bytes(changed)
        try:
            read_checkpoint(tmp_path / "state.pt")
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 60
    assert [one for one in said if "\n" in one or len(one) > 260] == []


def test_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    """Edge CK-2: truncated anywhere, foreign, holding code, or something else than a dict."""
    file = tmp_path / "state.pt"
    run = started("reference", "flat")
    torch.save(run.optimizer.state_dict(), file)
    assert plain(read_checkpoint(file)) == plain(run.optimizer.state_dict())
    content = file.read_bytes()
    bad = [content[:at] for at in (0, 1, 10, 100, len(content) // 2, len(content) - 1)]
    bad += [b"no checkpoint at all", content[::-1], content[:200] + bytes(300) + content[500:]]
    for broken in bad:
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="state.pt should be a whole") as caught:
            read_checkpoint(file)
        assert "\n" not in str(caught.value)
    torch.save({"scaler": Path("x")}, file)
    with pytest.raises(ValueError, match="names code.* pathlib"):
        read_checkpoint(file)
    torch.save([1], file)
    with pytest.raises(ValueError, match="holds a list, but should hold a dict"):
        read_checkpoint(file)
