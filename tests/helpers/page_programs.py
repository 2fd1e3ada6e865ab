"""Programs of a page on the ranks of a job, and what each prints, or the sentence that ends it.

    torchrun --nproc-per-node 2 -m tests.helpers.page_programs FOLDER NAME...

Rank 0 prints one line of JSON: for each program, first without and then with
`init_process_group` called before it, the output of every rank.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def ran(path: Path) -> str:
    """The output of a program, or the error that ends it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(path), run_name="__main__")
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return said.getvalue()


def main(folder: Path, names: list[str]) -> None:
    """Run all programs in a folder of this rank's own; rank 0 prints."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    os.chdir(own)
    found = [{name: ran(folder / name) for name in names}]
    # A second group in torchrun's store would meet the addresses of the first, and wait for them.
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found.append({name: ran(folder / name) for name in names if name != "several.py"})
    rows: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, found)
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
