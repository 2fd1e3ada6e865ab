"""Launchers written for a GPU run unchanged where replay models one, and nothing of it stays."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from twinstep.replay.triton import torch_cuda
from twinstep.replay.triton.gpu import GPU, PATCHES


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A launcher as it is written for a GPU."""
    assert x.is_cuda
    assert x.device.type == "cuda"
    assert not x.is_cpu
    assert x.get_device() == torch.cuda.current_device() == 0
    out = torch.empty(x.shape, dtype=x.dtype, device=f"cuda:{x.get_device()}")
    properties = torch.cuda.get_device_properties(x.device)
    programs = min(properties.multi_processor_count, triton.cdiv(x.numel(), 64))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    assert (stream.device, stream.device_type, stream.query()) == (x.device, 1, True)
    with torch.cuda.device(x.device), torch.cuda.stream(stream):
        x.record_stream(stream)
        begin.record()
        double[(programs,)](x, out, x.numel(), BLOCK=64)
        end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    return out


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    twinstep.replay.activate(cuda=True)
    try:
        yield
    finally:
        twinstep.replay.deactivate()


def test_a_launcher_for_a_gpu_runs() -> None:
    x = torch.rand(1000, device="cuda")
    assert torch.equal(doubled(x), 2 * x)


def test_nothing_of_it_stays() -> None:
    twinstep.replay.deactivate()
    try:
        before = [getattr(owner, name, None) for owner, name, _ in PATCHES]
        x = torch.rand(8)
        with twinstep.replay.modelled_gpu():
            assert x.is_cuda
            assert [getattr(owner, name) for owner, name, _ in PATCHES] != before
        with pytest.raises(ZeroDivisionError), twinstep.replay.modelled_gpu():
            print(1 / 0)
        assert [getattr(owner, name, None) for owner, name, _ in PATCHES] == before
        assert not x.is_cuda
        assert x.numpy() is not None
    finally:
        twinstep.replay.activate(cuda=True)


def test_contexts_nest() -> None:
    with twinstep.replay.modelled_gpu(), twinstep.replay.modelled_gpu():
        assert torch.empty(1, device="cuda").is_cuda
        assert not torch.empty(1).is_cuda
    assert torch.cuda.is_available()
    assert torch_cuda.modelled()


def test_the_properties_are_those_that_triton_compiles_for() -> None:
    target = triton.runtime.driver.active.get_current_target()
    known = triton.runtime.driver.active.utils.get_device_properties(0)
    seen = torch.cuda.get_device_properties()
    assert torch.cuda.get_device_capability() == (seen.major, seen.minor)
    assert 10 * seen.major + seen.minor == target.arch
    assert seen.multi_processor_count == known["multiprocessor_count"]
    assert seen.name == GPU.name
    assert GPU.shared_memory_per_block_optin == known["max_shared_mem"]
    assert triton.runtime.driver.active.get_active_torch_device() == torch.device("cuda", 0)


Make = Callable[[], torch.Tensor]
PLACES: list[tuple[Make, bool]] = [
    (lambda: torch.empty(3), False),
    (lambda: torch.empty(3, device="cpu"), False),
    (lambda: torch.empty(3, device=0), True),
    (lambda: torch.tensor([1.0], device=torch.device("cuda")), True),
    (lambda: torch.ones(3, device="cuda").cpu(), False),
    (lambda: torch.ones(3, device="cuda").to("cpu", torch.float16), False),
    (lambda: torch.ones(3, device="cuda").to(torch.float16), True),
    (lambda: torch.ones(3).to(torch.float16), False),
    (lambda: torch.ones(3).cuda(), True),
    (lambda: torch.ones(3).to("cuda", non_blocking=True), True),
    (lambda: torch.ones(3).to(torch.ones(1, device="cuda")), True),
    (lambda: torch.ones(3).to(device="cuda", copy=True), True),
    (lambda: torch.zeros_like(torch.ones(3, device="cuda")), True),
    (lambda: torch.zeros_like(torch.ones(3), device="cuda"), True),
    (lambda: torch.ones(3, device="cuda").new_zeros(2), True),
    (lambda: torch.ones(3)[1:] + 1, False),
    (lambda: torch.ones(3, device="cuda")[1:] + 1, True),
    (lambda: torch.stack([torch.ones(()), torch.ones((), device="cuda")]), True),
    (lambda: torch.nn.Linear(2, 2).cuda().weight, True),
    (lambda: torch.nn.Linear(2, 2).weight, False),
    (lambda: torch.eye(3).to_sparse(), False),
    (lambda: torch.eye(3, device="cuda").to_sparse(), True),
    (lambda: torch.nn.Linear(2, 2, device="cuda")(torch.ones(1, 2, device="cuda")), True),
]


@pytest.mark.parametrize(("make", "on_device"), PLACES)
def test_a_tensor_is_where_a_gpu_would_have_it(make: Make, on_device: bool) -> None:
    tensor = make()
    assert tensor.is_cuda == on_device
    assert tensor.device == torch.device(*(("cuda", 0) if on_device else ("cpu",)))


def test_a_default_device_is_kept() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.arange(3).is_cuda
        assert not torch.arange(3, device="cpu").is_cuda
    finally:
        torch.set_default_device(None)


def test_random_numbers_of_the_device_follow_every_seed() -> None:
    drawn = []
    for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
        seed(7)
        drawn.append(torch.rand(3, device="cuda").tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_what_is_loaded_is_where_it_is_asked_for() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(3, device="cuda")}, file)
    for place, on_device in (("cpu", False), (torch.device("cuda"), True)):
        file.seek(0)
        found = torch.load(file, map_location=place, weights_only=True)["x"]
        assert found.is_cuda == on_device
        assert found.tolist() == [1, 1, 1]


def test_a_transfer_copies_and_a_tensor_that_is_there_stays() -> None:
    x = torch.ones(3, device="cuda")
    x.cpu().add_(1)
    assert x.tolist() == [1, 1, 1]
    h = torch.ones(3)
    h.to(x.device).add_(1)
    assert h.tolist() == [1, 1, 1]
    assert x.to("cuda") is x
    assert h.cpu() is h


def test_a_kernel_takes_no_memory_of_the_host_but_pinned() -> None:
    x, pinned = torch.ones(8, device="cuda"), torch.ones(8, pin_memory=True)
    with pytest.raises(twinstep.replay.ReplayError, match="Argument out is a tensor on the CPU"):
        double[(1,)](x, torch.empty(8), 8, BLOCK=8)
    double[(1,)](x, pinned, 8, BLOCK=8)
    assert pinned.is_pinned()
    assert pinned.tolist() == [2] * 8
    double[(1,)](x, torch.ones(8).pin_memory(), 8, BLOCK=8)


def test_what_a_gpu_would_refuse_is_refused() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal: cuda:1"):
        torch.empty(1, device="cuda:1")
    with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
        torch.cuda.get_device_properties("cpu")


def test_host_memory_that_is_gone_is_forgotten() -> None:
    sides = torch_cuda._SIDES.get()
    assert sides is not None
    for _ in range(2000):
        torch.empty(3)
    assert len(sides._host) < 1200


def test_gradients_are_on_the_device() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


def test_hooks_of_a_backward_pass_find_the_gpu() -> None:
    made: list[torch.Tensor] = []

    def hook(grad: torch.Tensor) -> None:
        made.extend([grad, torch.zeros(3, device=grad.device), torch.ones(3)])

    x = torch.ones(3, device="cuda", requires_grad=True)
    x.register_hook(hook)
    (x * 2).backward(gradient=torch.ones(3, device="cuda"), inputs=[x])
    assert [tensor.is_cuda for tensor in made] == [True, True, False]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_triton_measures() -> None:
    x = torch.ones(8, device="cuda")
    assert triton.testing.do_bench(lambda: double[(1,)](x, x, 8, BLOCK=8), warmup=1, rep=1) > 0
