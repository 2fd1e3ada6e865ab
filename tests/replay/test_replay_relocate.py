"""Laws of source paths: a fault names the file at hand, wherever its kernel was compiled first."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import twinstep.replay
from twinstep.replay.errors import OutOfBounds
from twinstep.replay.ptx.relocate import relocate

KERNEL = """import triton
import triton.language as tl


@triton.jit
def past_the_end_{name}(x_ptr, n):
    tl.store(x_ptr + n, 1.0)
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_fault_names_the_copy_that_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for place in ("first/kernel.py", "second/kernel.py", "second/other.py"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(KERNEL.format(name="copied"))
        twinstep.replay.activate()
        try:
            with pytest.raises(OutOfBounds) as caught:
                load(path).past_the_end_copied[(1,)](torch.zeros(4), 4)
        finally:
            twinstep.replay.deactivate()
        assert f"{path}:7" in str(caught.value)


def test_files_beside_the_kernel_move_with_it_and_others_stay(tmp_path: Path) -> None:
    here = tmp_path / "new" / "fast"
    here.mkdir(parents=True)
    for name in ("adam.py", "_arith.py"):
        (here / name).touch()
    ptx = (
        '\t.file\t1 "/old/fast/adam.py"\n.file 2 "/old/fast" "_arith.py"\n'
        '.file 3 "/lib/triton/standard.py"\n.file 4 "/old/fast/gone.py"\n'
        ".entry k\n.loc 2 9 1, function_name $L, inlined_at 1 5 1\n.loc 1 5 0 // adam.py\n"
    )
    assert relocate(ptx, str(here / "adam.py")).partition(".entry")[0] == (
        f'\t.file\t1 "{here}/adam.py"\n.file 2 "{here}/_arith.py"\n'
        '.file 3 "/lib/triton/standard.py"\n.file 4 "/old/fast/gone.py"\n'
    )


def test_nothing_changes_where_the_paths_are_right_or_unknown() -> None:
    files = '.file 1 "/a/kernel.py"\n.file 2 "/b/kernel.py"\n'
    ptx = files + ".loc 1 3 0\n.entry k\n.loc 2 5 0\n"
    assert relocate(ptx, "/b/kernel.py") == ptx
    assert relocate(files, "/b/other.py") == files
    assert relocate(ptx, "") == ptx
