"""Part: exact kernels leave the same bits on the GPU as on replay.

Each engine fills a file in a process of its own, because a kernel compiled under one Triton driver
must not be launched under another. Then the files are compared.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from twinstep.benchmarks import part
from twinstep.benchmarks.part import Broken, Figures, Job
from twinstep.parity.cases.case import Case, Recipe
from twinstep.parity.cases.generate import generate
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.expected.ulp import same
from twinstep.parity.registry.engines import engine_named, running
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels

# Sizes by layout: a tail after full tiles, less than a tile, empties, and mixed alignment.
SIZES = {
    "flat": ((8219,), (33,)),
    "list": ((4099, 0, 130, 2048, 1), (7, 1, 1025)),
    "": ((),),
}
SCALAR_SEEDS = 24
REGIMES = ("mixture", "planted", "bits")
Outputs = dict[str, Tensor]


def run() -> Iterator[Figures]:
    """Compare cuda with replay."""
    yield compare_engines("cuda", "replay", exact_kernels())


def exact_kernels() -> list[Kernel]:
    """Our launchers that claim every bit.

    The public functions in front of them are rows of the registry too, but launch the same kernels.
    """
    register_house()
    return [
        kernel
        for kernel in kernels()
        if kernel.arithmetic == "exact"
        and "cuda" in kernel.engines
        and kernel.function.__module__.startswith("twinstep.fast.kernels")
    ]


def compare_engines(one: str, other: str, chosen: Sequence[Kernel]) -> Figures:
    """Run kernels on two engines, in two processes at the same time, and compare all they write.

    Raises:
        Broken: a process failed, or some element differs.
    """
    names = [kernel.name for kernel in chosen]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{place}.pt" for place in ("one", "other")]
        jobs = [
            Job("benchmarks.engines", [engine, str(file), *names])
            for engine, file in zip((one, other), files, strict=True)
        ]
        for number, (status, output) in part.run_jobs(jobs, len(jobs)):
            if status:
                engine = (one, other)[number]
                raise Broken(f"the kernels on {engine} ended with {status}: {output[-1000:]}")
        first, second = (torch.load(file, weights_only=True) for file in files)
    wrong = differences(first, second)
    if wrong:
        shown = "; ".join(wrong[:5])
        raise Broken(f"{len(wrong)} of {len(first)} outputs differ, {one} against {other}: {shown}")
    elements = sum(output.numel() for output in first.values())
    return {"kernels": len(names), "outputs": len(first), "elements": elements}


def differences(one: Outputs, other: Outputs) -> list[str]:
    """Outputs that are missing on one side or differ, with the first element that does."""
    if one.keys() != other.keys():
        return sorted(f"{key} is on one engine only" for key in one.keys() ^ other.keys())
    found = []
    for key, got in one.items():
        places = (~same(got, other[key])).reshape(-1).nonzero()
        if places.numel():
            at = int(places[0].item())
            values = got.reshape(-1)[at].item(), other[key].reshape(-1)[at].item()
            found.append(f"{key}[{at}] {values[0]!r} and {values[1]!r}")
    return found


def outputs(kernel: Kernel, engine_name: str) -> Outputs:
    """Everything that a kernel writes on one engine, by case, argument and index."""
    engine = engine_named(engine_name)
    found: Outputs = {}
    with running(engine):
        for label, case in cases(kernel):
            memory = GuardedMemory.of(case, engine.device)
            memory.call(kernel.function)
            after = memory.after()
            for span in memory.spans:
                if span.name in case.operation.writes:
                    found[f"{label} {span.name}[{span.index}]"] = span.of(after).clone()
    return found


def cases(kernel: Kernel) -> Iterator[tuple[str, Case]]:
    """The same cases on every machine: dtypes × layouts × sizes × regimes, controls drawn."""
    operation = kernel.operation
    for dtype in kernel.dtypes:
        for layout in kernel.layouts or ("",):
            seeds = len(REGIMES) if operation.lists else SCALAR_SEEDS
            for sizes in SIZES[layout]:
                for seed in range(seeds):
                    label = f"{kernel.name} {dtype} {layout} {sizes} {seed}"
                    recipe = _recipe(kernel, layout, sizes, seed, label)
                    yield label, generate(operation, dtype, recipe)


def first_cases(kernel: Kernel) -> Iterator[Case]:
    """The first case of every dtype combination and layout."""
    seen: set[tuple[str, str]] = set()
    for _, case in cases(kernel):
        key = (case.combination, case.recipe.layout)
        if key not in seen:
            seen.add(key)
            yield case


def _recipe(kernel: Kernel, layout: str, sizes: tuple[int, ...], seed: int, label: str) -> Recipe:
    draw = random.Random(label)
    operation = kernel.operation
    return Recipe(
        layout=layout or "list",
        sizes=sizes,
        regime=REGIMES[seed % len(REGIMES)],
        seed=draw.getrandbits(32),
        controls={control.name: draw.choice(control.values) for control in operation.controls},
        options={option.name: draw.choice(option.choices) for option in operation.options},
        aligned=seed % 2 == 0,
    )


def main(arguments: Sequence[str]) -> int:
    """Child process: `ENGINE FILE KERNEL...`."""
    engine, file, *names = arguments
    found: Outputs = {}
    for kernel in exact_kernels():
        if kernel.name in names:
            found |= outputs(kernel, engine)
    torch.save(found, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
