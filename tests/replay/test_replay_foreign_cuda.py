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
