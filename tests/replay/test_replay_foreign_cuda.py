"""CUDA C++ on replay: compiled here where NVRTC is installed, from committed PTX everywhere."""

from __future__ import annotations

import pytest
import torch

import twinstep.replay
from twinstep.replay.corpus.store import read
from twinstep.replay.cuda import nvrtc

needs_nvrtc = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "installed")

SAXPY = """
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""

BLOCK_SUM = """
#include <cuda_fp16.h>
extern "C" __global__ void block_sum(const __half *x, float *out, int n) {
    extern __shared__ float parts[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    parts[threadIdx.x] = i < n ? __half2float(x[i]) : 0.0f;
    for (int width = blockDim.x / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = parts[0];
}
"""


@needs_nvrtc
def test_a_kernel_from_source_agrees_with_torch() -> None:
    x, y = torch.randn(1000), torch.randn(1000)
    want = (x.double() * 1.5 + y.double()).float()
    kernel = twinstep.replay.cuda_kernel(SAXPY, "saxpy")
    launch = kernel((4,), (256,), 1.5, x, y, 1000)
    assert torch.equal(y, want)
    assert (launch.bytes_read, launch.bytes_written) == (8000, 4000)


@needs_nvrtc
@pytest.mark.parametrize("target", ["compute_80", "compute_90", "compute_100"])
def test_headers_shared_memory_and_targets(target: str) -> None:
    x = torch.randint(-50, 50, (500,)).half()
    out = torch.zeros(2)
    kernel = twinstep.replay.cuda_kernel(BLOCK_SUM, "block_sum", target=target)
    kernel((2,), (256,), x, out, 500, shared=1024)
    assert torch.equal(out, torch.stack([x[:256].float().sum(), x[256:].float().sum()]))


TWO_KINDS = """
extern __shared__ float floats[];
extern __shared__ double doubles[];
extern "C" __global__ void two_kinds(float *x) {
    __shared__ float fixed[33];
    int i = threadIdx.x;
    fixed[i] = x[i];
    floats[i] = 2 * x[i];
    __syncthreads();
    x[i] = fixed[31 - i] + floats[31 - i] + ((char *)doubles != (char *)floats);
}
"""


@needs_nvrtc
def test_dynamic_shared_memory_lies_behind_what_has_a_size() -> None:
    x = torch.arange(32.0)
    kernel = twinstep.replay.cuda_kernel(TWO_KINDS, "two_kinds")
    kernel((1,), (32,), x, shared=128)
    assert torch.equal(x, 3 * torch.arange(31.0, -1, -1))
    with pytest.raises(twinstep.replay.OutOfBounds):
        kernel((1,), (32,), x, shared=64)


HOARDS = """
extern "C" __global__ void hoards(float *x) {
    __shared__ float all[SIZE];
    all[threadIdx.x] = x[threadIdx.x];
    all[SIZE - 1] = 1;
    __syncthreads();
    x[threadIdx.x] = all[31 - threadIdx.x];
}
"""


@needs_nvrtc
def test_what_no_gpu_launches_is_refused() -> None:
    small, large = (
        twinstep.replay.cuda_kernel(HOARDS.replace("SIZE", size), "hoards")
        for size in ("12288", "12289")
    )
    small((1,), (32,), torch.zeros(32))
    for kernel, grid, block, shared, says in (
        (large, (1,), (32,), 0, "49,156 bytes of static shared memory, but a GPU takes at most"),
        (small, (1,), (32,), 183_297, r"49,152 \+ 183,297 bytes of shared memory"),
        (small, (1,), (32,), -4, r"49,152 \+ -4 bytes of shared memory"),
        (small, (1,), (32, 33), 0, "blocks of 32 x 33 x 1 threads, but a GPU takes at most 1,024"),
        (small, (1,), (1, 1, 65), 0, "takes at most 1,024 x 1,024 x 64"),
        (small, (1,), (0,), 0, "blocks of 0 x 1 x 1 threads, but a GPU takes none that is empty"),
        (small, (0,), (32,), 0, "a grid of 0 x 1 x 1 blocks, but a GPU takes none that is empty"),
    ):
        with pytest.raises(twinstep.replay.ReplayError, match=says):
            kernel(grid, block, torch.zeros(32), shared=shared)


@needs_nvrtc
def test_a_source_with_a_mistake_is_refused_with_its_line() -> None:
    with pytest.raises(twinstep.replay.ReplayError, match=r"saxpy.cu\(4\): error"):
        twinstep.replay.cuda_kernel(SAXPY.replace("float *y", "const float *y"), "saxpy")


@needs_nvrtc
def test_a_fault_names_the_line_of_the_source() -> None:
    kernel = twinstep.replay.cuda_kernel(
        SAXPY.replace("i < n", "i <= n"), "saxpy", options=["--generate-line-info"]
    )
    with pytest.raises(twinstep.replay.OutOfBounds, match=r"saxpy\.cu:4"):
        kernel((4,), (256,), 1.5, torch.ones(1000), torch.ones(1000), 1000)


def test_a_committed_kernel_runs_where_no_compiler_is() -> None:
    entry = next(e for e in read().entries if e.case == "axpy")
    kernel = nvrtc.CudaKernel("axpy", read().text(entry).whole)
    x, y = torch.arange(9.0), torch.ones(9)
    launch = kernel((1,), (32,), 2.0, x, y, 9)
    assert y.tolist() == [2.0 * i + 1 for i in range(9)]
    assert launch.kernel == "axpy"


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(nvrtc, "_library", absent)
    with pytest.raises(twinstep.replay.ReplayError, match=r"install cuda-bindings.*extra"):
        twinstep.replay.cuda_kernel(SAXPY, "saxpy")


def test_a_compiler_that_does_not_load_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("libnvrtc.so not found.\nsearched everywhere")

    monkeypatch.setattr(nvrtc, "_library", broken)
    assert nvrtc.missing() == "NVRTC cannot be loaded: libnvrtc.so not found."
