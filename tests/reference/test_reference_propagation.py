"""Reference functions run on tensor subclasses, using only operations whose error is known.

The judge derives error bounds by sending a subclass through these functions. That works as long as
data never leaves through `.item()`, `bool()` or an operation without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.operations.buffers import global_norm, unscale
from twinstep.parity.operations.steps import mixed_step
from twinstep.reference import norm as norms
from twinstep.reference.accumulate import accumulate
from twinstep.reference.adam import adam_step, adamw_step
from twinstep.reference.arithmetic import float64
from twinstep.reference.buffers import cast_copy
from twinstep.reference.clip import clip_factor
from twinstep.reference.lamb import lamb_step
from twinstep.reference.sgd import sgd_step

ARITHMETIC = {"add", "sub", "mul", "div", "true_divide", "rsub", "rdiv", "sqrt", "abs"}
ARITHMETIC |= {"maximum", "minimum"}
PLACEMENT = {"to", "clone", "reshape", "where", "__get__", "ones_like", "numel"}
DECISIONS = {"isfinite", "any", "invert", "bitwise_not", "gt", "lt", "ne", "and", "bitwise_and"}
ALLOWED = ARITHMETIC | PLACEMENT | DECISIONS


class Watched(Tensor):
    """Data that writes down what is done to it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Note the name."""
        SEEN.add(func.__name__)
        return super().__torch_function__(func, types, args, dict(kwargs or {}))


SEEN: set[str] = set()


@pytest.fixture(autouse=True)
def norm_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the judge does: no tensor operation shows an exact sum."""
    plain = norms.root_of_squares

    def root(tensors: Sequence[Tensor]) -> Tensor:
        SEEN.add("exact norm")
        bare = [x.as_subclass(Tensor) for x in tensors]
        return plain(bare).as_subclass(Watched)

    monkeypatch.setattr(norms, "root_of_squares", root)


def watched(*tensors: Tensor) -> list[Tensor]:
    SEEN.clear()
    return [t.clone().as_subclass(Watched) for t in tensors]


def plain_names(names: set[str]) -> set[str]:
    """`__radd__` and `add` are one operation."""
    bare = {n if n == "__get__" else n.strip("_") for n in names}
    folded = {n[1:] if n[:1] == "r" and n[1:] in ARITHMETIC else n for n in bare}
    return {"div" if n in ("truediv", "rtruediv") else n for n in folded}


def assert_only_allowed() -> None:
    assert SEEN
    assert plain_names(SEEN) <= ALLOWED


def data(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [moderate(8, seed, dtype) for seed in range(count)]


def test_sgd_runs_on_subclasses() -> None:
    p, g, b = watched(*data(3))
    out = sgd_step(
        [p], [g], [b], [torch.zeros(8).half()], [torch.tensor(1)],
        lr=float64(0.1), momentum=float64(0.9), dampening=float64(0.1), weight_decay=float64(0.1),
        factor=torch.tensor(0.5), found_inf=torch.tensor(0.0), nesterov=True,
    )  # fmt: skip
    assert all(isinstance(t, Watched) for t in (out[0][0], out[1][0], out[2][0]))
    assert_only_allowed()


@pytest.mark.parametrize("step", [adam_step, adamw_step])
def test_adam_runs_on_subclasses(step: Callable[..., tuple[list[Tensor], ...]]) -> None:
    p, g, m, v = watched(*data(4))
    out = step(
        [p], [g], [m], [v], [torch.zeros(8).half()], [torch.tensor(1)],
        lr=float64(0.1), beta1=float64(0.9), beta2=float64(0.99), eps=float64(1e-8),
        weight_decay=float64(0.1), factor=torch.tensor(0.5), found_inf=torch.tensor(0.0),
        bias_correction=True,
    )  # fmt: skip
    assert all(isinstance(tensors[0], Watched) for tensors in out[:4])
    assert_only_allowed()


def test_lamb_runs_on_subclasses() -> None:
    p, g, m, v = watched(*data(4))
    names = "lr beta1 beta2 eps weight_decay max_coeff min_coeff"
    out = lamb_step(
        [p], [g], [m], [v], [torch.zeros(8).half()], [torch.tensor(1)],
        **{name: float64(0.5) for name in names.split()},
        factor=torch.tensor(0.5), found_inf=torch.tensor(0.0),
        bias_correction=True, eps_inside_sqrt=False,
    )  # fmt: skip
    assert all(isinstance(tensors[0], Watched) for tensors in out[:4])
    assert "exact norm" in SEEN
    SEEN.discard("exact norm")
    assert_only_allowed()


def test_buffers_run_on_subclasses() -> None:
    for run in (
        lambda x, y: unscale([x], inv_scale=torch.tensor(0.5), found_inf=torch.tensor(0.0))[0][0],
        lambda x, y: accumulate([x], [y])[0],
        lambda x, y: cast_copy([x], [torch.float16])[0],
    ):
        x, y = watched(*data(2))
        assert isinstance(run(x, y), Watched)
        assert_only_allowed()


def test_norm_and_clip_run_on_subclasses() -> None:
    (g,) = watched(*data(1))
    norm, _ = global_norm([g], norm=torch.tensor(0.0), found_inf=torch.tensor(0.0))
    assert isinstance(norm, Watched)
    assert "exact norm" in SEEN
    SEEN.discard("exact norm")
    factor = clip_factor(norm=norm, scale=float64(2.0), max_norm=float64(1.0))
    assert isinstance(factor, Watched)
    assert_only_allowed()


def test_mixed_step_runs_on_subclasses() -> None:
    p, g, m, v = watched(*data(4))
    floats = "lr beta1 beta2 eps weight_decay max_norm scale scale_factor min_scale backoff_factor"
    integers = "cur_iter last_overflow_iter cur_hysteresis growth_tracker exhausted scale_window"
    step: Callable[..., tuple[list[Tensor] | Tensor, ...]] = mixed_step
    out = step(
        [p], [g], [m], [v], [], [torch.tensor(1)],
        **{name: float64(0.5) for name in floats.split()},
        **{name: torch.tensor(1) for name in [*integers.split(), "delayed_shift"]},
        norm=torch.tensor(0.0), found_inf=torch.tensor(0.0), adam_w_mode=True,
        bias_correction=True, rule="dynamic", consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
    )  # fmt: skip
    assert all(isinstance(out[index][0], Watched) for index in range(3))
    SEEN.difference_update({"exact norm", "item"})  # found_inf is decided on the host
    assert_only_allowed()


def test_the_watch_notices_a_forbidden_operation() -> None:
    (x,) = watched(*data(1))
    torch.addcmul(x, x, x)
    with pytest.raises(AssertionError):
        assert_only_allowed()
    (x,) = watched(*data(1))
    x[0].item()
    with pytest.raises(AssertionError):
        assert_only_allowed()
