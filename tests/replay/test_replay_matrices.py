"""ldmatrix and stmatrix against a plain statement of where each item lies."""

from __future__ import annotations

import pytest
import torch

import twinstep.replay

PTX = r"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
{
 .reg .b32 %r<20>; .reg .b64 %rd<10>;
 .shared .align 16 .b8 buf[512];
 ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1];
 mov.u32 %r1, %tid.x;
 shl.b32 %r2, %r1, 4;
 mov.u32 %r3, buf; add.s32 %r4, %r3, %r2;
 cvt.u64.u32 %rd3, %r2; add.s64 %rd4, %rd1, %rd3;
 ld.global.v4.b32 {%r5,%r6,%r7,%r8}, [%rd4];
 STORE [%r4], {%r5,%r6,%r7,%r8};
 bar.sync 0;
 LOAD {%r9,%r10,%r11,%r12}, [%r4];
 add.s64 %rd5, %rd2, %rd3;
 st.global.v4.b32 [%rd5], {%r9,%r10,%r11,%r12};
 ret;
}
"""
ROWS = "st.shared.v4.b32"
LOAD = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16"
STORE = "stmatrix.sync.aligned.m8n8.x4{}.shared.b16"


def executed(store: str, load: str) -> torch.Tensor:
    source = torch.arange(256, dtype=torch.int16)
    result = torch.zeros(256, dtype=torch.int16)
    text = PTX.replace("STORE", store).replace("LOAD", load)
    twinstep.replay.run_ptx(text, "k", (1, 1, 1), (32, 1, 1), [source, result])
    return result


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "trans"])
def test_ldmatrix_gives_each_lane_two_neighbours(transposed: bool) -> None:
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    found = executed(ROWS, LOAD.format(".trans" if transposed else "")).view(32, 4, 2)
    for lane in range(32):
        for half in range(2):
            row, column = lane // 4, 2 * (lane % 4) + half
            if transposed:
                row, column = column, row
            assert torch.equal(found[lane, :, half], matrices[:, row, column])


@pytest.mark.parametrize("mark", ["", ".trans"], ids=["rows", "trans"])
def test_stmatrix_is_undone_by_ldmatrix(mark: str) -> None:
    assert torch.equal(
        executed(STORE.format(mark), LOAD.format(mark)), torch.arange(256, dtype=torch.int16)
    )


def test_stmatrix_that_transposes_is_not_undone_by_a_plain_load() -> None:
    found = executed(STORE.format(".trans"), LOAD.format(""))
    assert not torch.equal(found, torch.arange(256, dtype=torch.int16))


def test_matrices_wait_for_the_whole_warp_where_its_threads_come_apart() -> None:
    """Most threads of either warp come back from further down."""
    text = PTX.replace("%r<20>;", "%r<21>; .reg .pred %p<2>;").replace("buf[512]", "buf[1024]")
    text = text.replace("STORE", ROWS).replace("LOAD", LOAD.format(""))
    text = text.replace("ret;", "ret; $FAR: add.s32 %r20, %r1, 1; bra.uni $HERE;")
    source = torch.arange(512, dtype=torch.int16)
    found = []
    for way in ("bar.sync 0; $HERE:", "bar.sync 0; setp.gt.u32 %p1, %r1, 6; @%p1 bra $FAR; $HERE:"):
        found.append(torch.zeros_like(source))
        code = text.replace("bar.sync 0;", way)
        twinstep.replay.run_ptx(code, "k", (1, 1, 1), (64, 1, 1), [source, found[-1]])
    assert torch.equal(*found)
    assert bool(found[0].any())
