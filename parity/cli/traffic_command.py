"""`parity traffic`: count what our kernels move, print it, hold it against the design."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from twinstep.parity.records.errors import EXIT_BROKEN, EXIT_KEPT, EXIT_TOO_LITTLE, UsageError
from twinstep.parity.registry.engines import require
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.registry.selection import Selection
from twinstep.parity.report.exports import write
from twinstep.parity.report.progress import progress
from twinstep.parity.report.traffic import as_json, bytes_table, off_design, over_rest, work_table
from twinstep.parity.report.traffic_count import Count, counted
from twinstep.parity.report.traffic_messages import messages_table

Names = Sequence[str] | None


def traffic(op: Names, kernel: Names, dtype: Names, parameters: int, json: str | None) -> int:
    """Count every selected call on replay; the exit code.

    Without `kernel` the launchers are counted; the public functions before them launch the same.

    Raises:
        UsageError: an unknown name, a file that cannot be written, or no replay here.
    """
    require("replay")
    from twinstep.parity.registry.house_kernels import register_house

    register_house()
    chosen = Selection(
        operations=tuple(op or ()), names=tuple(kernel or ()), dtypes=tuple(dtype or ())
    )
    screen = Console(stderr=json == "-", width=None if sys.stdout.isatty() else 170)
    counts = _counted(list(_calls(chosen)), parameters)
    if not counts:
        print("parity: nothing was counted, the selection has no tensors", file=sys.stderr)
        return EXIT_TOO_LITTLE
    screen.print(bytes_table(counts))
    screen.print(work_table(counts))
    screen.print(messages_table())
    broken = off_design(counts) + over_rest(counts)
    for sentence in broken:
        screen.print(sentence, style="bold red", highlight=False, markup=False, soft_wrap=True)
    calls = len({(count.kernel, count.dtype, count.layout) for count in counts})
    verdict = f"{len(broken)} numbers off the design" if broken else "every byte as designed"
    screen.print(
        f"{verdict} in {calls} calls, {len(counts)} launches", style="bold", highlight=False
    )
    if json is not None:
        write(json, as_json(counts), "--json")
    return EXIT_BROKEN if broken else EXIT_KEPT


def _calls(chosen: Selection) -> Iterator[tuple[Kernel, str, str]]:
    for kernel in chosen.kernels(kernels()):
        if not kernel.operation.lists or not (
            chosen.names or kernel.name.startswith(("triton.", "cuda."))
        ):
            continue
        if "replay" not in kernel.engines:
            # On replay their launchers would start the kernels in Triton.
            raise UsageError(
                f"{kernel.name} runs on {' and '.join(kernel.engines)}, but replay counts bytes of "
                "kernels for a GPU [--kernel]"
            )
        for dtype in kernel.dtypes:
            if not chosen.dtypes or dtype in chosen.dtypes:
                yield from ((kernel, dtype, layout) for layout in kernel.layouts)


def _counted(calls: Sequence[tuple[Kernel, str, str]], parameters: int) -> list[Count]:
    counts: list[Count] = []
    with progress(len(calls)) as told:
        for kernel, dtype, layout in calls:
            call = f"{kernel.name} {dtype} {layout}"
            told(call, 0)
            try:
                counts += counted(kernel, dtype, layout, parameters)
            except OSError as error:
                raise UsageError(
                    f"{parameters} parameters cannot be mapped: {error.strerror} [--params]"
                ) from error
            told(call, 1)
    return counts
