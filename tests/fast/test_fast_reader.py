"""Lists that C++ reads: the answers of Python, and Python's own where nothing can be compiled."""

from __future__ import annotations

import math
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers.battery import HYPER, Subject, advance, fill, observed
from twinstep.fast.optimizers.zeros import clear_where
from twinstep.fast.runtime import reader, watch
from twinstep.fast.runtime.reader import Reader
from twinstep.fast.runtime.watch import GradientReader, NotedGradients, Placed, StateWatch, same

COUNT = reader.LONG + 9
SHAPES: list[int | tuple[int, ...]] = [70, (3, 10), 5, (2, 7)] * (reader.LONG // 2)
WAYS = ("c++", "python")
Way = Callable[[str], None]
Change = Callable[[list[Tensor]], None]
WRAPPERS = ("FP16Optimizer", "FP16UnfusedOptimizer", "BF16Optimizer")


class Marked(Tensor):
    """A class of its own, without behaviour of its own."""


class Around(Tensor):
    """A tensor around another one, as a DTensor is."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Around:  # noqa: D102
        made: Around = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    held: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> Tensor:
        raise AssertionError(f"{func} asks for the tensor inside")


@pytest.fixture(scope="module")
def built() -> Reader:
    found = reader.library()
    assert found is not None, "no C++ compiler, or no headers of Python"
    return found


@pytest.fixture
def way(built: Reader, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Chooses who reads lists from now on."""

    def choose(name: str) -> None:
        found = built if name == "c++" else None
        monkeypatch.setattr(reader, "library", lambda: found)
        monkeypatch.setattr(watch, "library", lambda: found)

    return choose


def parameters(*, missing: tuple[int, ...] = ()) -> list[Tensor]:
    """Parameters of several dtypes and shapes, an empty one among them, most with gradients."""
    shapes = ((3, 5), (), (0,), (7,), (2, 1, 4))
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    found: list[Tensor] = []
    for index in range(COUNT):
        shape, dtype = shapes[index % 5], dtypes[index % 3]
        param = Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = None if index in missing else torch.ones_like(param)
        found.append(param)
    return found


def _renewed(params: list[Tensor]) -> None:
    for param in params:
        param.grad = None if param.grad is None else torch.ones_like(param)


def _crossed(params: list[Tensor]) -> None:
    params[5].grad = torch.ones(5, 3, dtype=params[5].dtype).t()


def _apart(params: list[Tensor]) -> None:
    params[8].grad = torch.ones(14, dtype=params[8].dtype)[::2]


def _beside(params: list[Tensor]) -> None:
    params[8].grad = torch.ones(8, dtype=params[8].dtype)[1:]


def _dtype(params: list[Tensor]) -> None:
    params[5].data = params[5].data.double()
    params[5].grad = torch.ones(3, 5, dtype=torch.float64)


def _sparse(params: list[Tensor]) -> None:
    params[5].grad = torch.ones(3, 5, dtype=params[5].dtype).to_sparse()


def _subclass(params: list[Tensor]) -> None:
    params[5].grad = torch.ones(3, 5, dtype=params[5].dtype).as_subclass(Marked)


def _dropped(params: list[Tensor]) -> None:
    params[-1].grad = None


def _arrived(params: list[Tensor]) -> None:
    params[1].grad = torch.ones_like(params[1])


def _moved(params: list[Tensor]) -> None:
    params[3].data = params[3].data.clone()


def _moved_without(params: list[Tensor]) -> None:
    params[0].data = params[0].data.clone()


def _exchanged(params: list[Tensor]) -> None:
    torch.utils.swap_tensors(params[0], params[15])


def _resized(params: list[Tensor]) -> None:
    params[3].untyped_storage().resize_(0)


def _inference(params: list[Tensor]) -> None:
    with torch.inference_mode():
        params[3].grad = torch.ones_like(params[3])


CHANGES = (
    *(_renewed, _crossed, _apart, _beside, _dtype, _sparse, _subclass, _dropped, _arrived, _moved),
    *(_moved_without, _exchanged, _resized, _inference),
)
SEEN = (
    _crossed,
    _apart,
    _dtype,
    _sparse,
    _dropped,
    _arrived,
    _moved,
    _moved_without,
    _resized,
    _exchanged,
)


@pytest.mark.parametrize("change", CHANGES)
def test_both_ways_to_read_gradients_find_the_same(change: Change, way: Way) -> None:
    missed = {}
    for name in WAYS:
        way(name)
        params = parameters(missing=(0, 1))
        watched = GradientReader(params)
        assert watched.read()
        lists = [watched.moving(each, None) for each in (slice(0, len(watched.params)), [4, 2])]
        change(params)
        looks = [watched.read() for _ in range(3)]
        missed[name] = [not read for read in looks]
        held = [param.grad for param in params if param.grad is not None]
        if any(looks):
            assert list(watched.addresses) == [grad.data_ptr() for grad in held]
            assert same(list(lists[0]), held)
            assert same(list(lists[1]), [held[4], held[2]])
    assert missed["c++"] == missed["python"] == [change in SEEN] * 3


def test_gradients_that_have_only_moved_are_read_without_python(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    way("c++")
    params = parameters(missing=(0, 1))
    watched = GradientReader(params)
    watched.read()
    monkeypatch.delattr(GradientReader, "_read_by_python")
    _renewed(params)
    assert watched.read()
    _crossed(params)
    with pytest.raises(AttributeError, match="_read_by_python"):
        watched.read()


@pytest.mark.parametrize("kind", [Marked, Around])
def test_classes_that_may_answer_for_themselves_are_left_to_python(
    kind: type[Tensor], way: Way
) -> None:
    way("c++")
    params = parameters()
    assert reader.reader_of(params) is not None
    one = torch.ones(3)
    params[3] = one.as_subclass(kind) if kind is Marked else Around(one)
    assert reader.reader_of(params) is None
    assert reader.reader_of(params[4:20]) is None  # short


def test_a_gradient_around_others_is_no_gradient_to_either(way: Way) -> None:
    for name in WAYS:
        way(name)
        params = parameters()
        watched = GradientReader(params)
        assert watched.read()
        one = torch.ones(3, 5, dtype=params[5].dtype)
        params[5].grad = Around(one)
        assert not watched.read()


State = dict[Tensor, dict[str, Tensor]]
NAMES = ("step", "exp_avg")
STATES: dict[str, tuple[Callable[[State, Tensor], object], bool]] = {
    "nothing": (lambda state, one: None, True),
    "written": (lambda state, one: state[one]["exp_avg"].add_(1.0), True),
    "further": (lambda state, one: state[one].update(other=torch.zeros(1)), True),
    "replaced": (lambda state, one: state[one].update(step=torch.tensor(0)), False),
    "removed": (lambda state, one: state[one].pop("step"), False),
    "moved": (lambda state, one: setattr(state[one]["exp_avg"], "data", torch.ones(9)), False),
    "other dict": (lambda state, one: state.update({one: dict(state[one])}), False),
    "forgotten": (lambda state, one: state.pop(one), False),
    "added": (lambda state, one: state.update({torch.zeros(1): {}}), False),
    "at the end": (lambda state, one: state.update({one: state.pop(one)}), False),
}


@pytest.mark.parametrize("label", STATES)
@pytest.mark.parametrize("name", WAYS)
def test_both_ways_to_watch_state_see_the_same(name: str, label: str, way: Way) -> None:
    way(name)
    change, holds = STATES[label]
    params = parameters()
    state = {p: {"step": torch.tensor(0), "exp_avg": torch.zeros_like(p)} for p in params}
    state[params[2]] = {}
    watched = StateWatch(state, NAMES)
    assert watched.holds(state)
    change(state, params[8])
    assert watched.holds(state) == holds


@pytest.mark.parametrize("name", WAYS)
def test_lists_are_compared_by_identity_and_by_address(name: str, way: Way) -> None:
    way(name)
    params = parameters()
    placed, others = Placed(params), list(params)
    assert placed.holds()
    assert same(others, params)
    assert not same(others[1:], params)
    others[-1] = params[0]
    assert not same(others, params)
    _moved(params)
    assert not placed.holds()


@pytest.mark.parametrize("name", WAYS)
def test_noted_gradients_are_known_again_and_freed_meanwhile(name: str, way: Way) -> None:
    way(name)
    params = parameters(missing=(0,))
    size = params[3].grad.untyped_storage() if params[3].grad is not None else None
    held = weakref.ref(size)
    del size
    noted = GradientReader(params).noted()
    others = NotedGradients(params)
    params[1].grad = None
    params[0].grad = torch.ones_like(params[0])
    for place in (2, 3):
        params[place].grad = torch.ones_like(params[place])
    assert held() is None
    assert same(noted.still(), params[4:])
    assert same(others.still(), params[4:])


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_dropped_with_all_that_hangs_on_them(name: str, way: Way) -> None:
    way(name)
    params = parameters(missing=(0,))
    ended: list[int] = []
    for index, param in enumerate(params[1:]):
        assert param.grad is not None
        weakref.finalize(param.grad, ended.append, index)
    GradientReader(params).drop()
    assert all(param.grad is None for param in params)
    assert ended == list(range(len(params) - 1))


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_gradients_are_cleared_bit_by_bit_or_not_at_all(found: float) -> None:
    sizes = ((torch.int16, torch.float16), (torch.int16, torch.bfloat16), (torch.int32, None))
    words = [
        torch.randint(-(2**15), 2**15, (300,), dtype=whole) * (1 if dtype else 65537)
        for whole, dtype in sizes
    ]
    grads = [
        each.clone().view(dtype or torch.float32).view(20, 15).t()
        for each, (_, dtype) in zip(words, sizes, strict=True)
    ]
    clear_where(grads, torch.tensor(found))
    for each, grad in zip(words, grads, strict=True):
        got = grad.t().reshape(-1).view(each.dtype)
        assert torch.equal(got, each if found == 0.0 else torch.zeros_like(each))


@pytest.mark.parametrize("name", [*WRAPPERS, "FusedAdam", "FusedLamb"])
def test_a_class_takes_the_same_steps_whoever_reads(name: str, way: Way) -> None:
    def trained(who: str) -> list[dict[str, object]]:
        way(who)
        subject, seen = Subject("fast", name), []
        params = subject.parameters(*SHAPES)
        optimizer = subject(params, hyper=HYPER)
        for seed in range(5):
            fill(params, seed)
            if seed == 2:
                params[7].grad = None
            if seed == 3 and name in WRAPPERS:
                params[9].grad = torch.full_like(params[9], math.inf)
            advance(optimizer)
            seen.append(observed(optimizer, params))
        return seen

    assert trained("c++") == trained("python")


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_python_reads_and_nothing_is_said(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"readers of tensors.* \[fast.runtime.reader\]$"):
        reader._built()
    assert reader.library.__wrapped__() is None


def test_a_library_that_reads_otherwise_is_not_used(
    built: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.library.__wrapped__() is not None
    wrong = array("q", [16, 16, 16, 16])
    monkeypatch.setattr(Reader, "gradients", lambda *_: wrong)
    assert reader.library.__wrapped__() is None
