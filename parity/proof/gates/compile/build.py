"""Compile variants in child processes, one for each target, and keep what was found.

Results are kept in Triton's own cache folder under a hash of the kernel's source, its
specialisation, the compiler's versions and the code that reads the facts.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton

import twinstep
from twinstep.parity.proof.gates.compile import artefacts, cuda, main_loop, shortest_way, worker
from twinstep.parity.proof.gates.compile.artefacts import Facts
from twinstep.parity.proof.gates.compile.cuda import CudaVariant
from twinstep.parity.proof.gates.compile.variants import Variant as TritonVariant
from twinstep.parity.records.errors import NoDeviceError

Variant = TritonVariant | CudaVariant
READERS = (artefacts, cuda, main_loop, shortest_way, worker)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
PATIENCE = 300.0  # seconds for one variant
Told = Callable[["Built"], None]


@dataclass(frozen=True)
class Built:
    """Result for one variant on one target: facts, or why there are none."""

    variant: Variant
    target: str
    facts: Facts
    error: str = ""


def compiler(target: str) -> str:
    """Names and versions of what compiles for a target.

    Raises:
        NoDeviceError: Triton finds no assembler.
    """
    versions = f"triton {triton.__version__}"
    if not target.startswith("sm_"):
        return versions
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if int(target[3:]) >= 100 else tools.ptxas
    try:
        return f"{versions}, ptxas {tool.version}"
    except (RuntimeError, OSError, AttributeError) as error:
        raise NoDeviceError(
            f"Triton finds no ptxas for {target}: install the triton wheel with its own, or set "
            f"TRITON_PTXAS_PATH (TRITON_PTXAS_BLACKWELL_PATH from sm_100 on) [--target {target}]"
        ) from error


def build(variants: Sequence[Variant], targets: Sequence[str], told: Told) -> list[Built]:
    """Facts of every variant on every target that applies to it; `told` hears of each."""
    known = {target: compiler(target) for target in targets}
    workers = min(len(targets), os.cpu_count() or 1)
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        jobs = [pool.submit(_build, variants, target, known[target], told) for target in targets]
        return [built for job in jobs for built in job.result()]


def _build(variants: Sequence[Variant], target: str, versions: str, told: Told) -> list[Built]:
    found: dict[int, Built] = {}
    variants = [one for one in variants if applies(one, target)]
    ours = cuda.compilers([target]).get(cuda.maker(cuda.PREFIX, target), "")
    files = [
        _file(one, target, ours if isinstance(one, CudaVariant) else versions) for one in variants
    ]
    for index, (variant, file) in enumerate(zip(variants, files, strict=True)):
        if file.exists():
            found[index] = Built(variant, target, json.loads(file.read_text()))
            told(found[index])
    while len(found) < len(variants):
        missing = [index for index in range(len(variants)) if index not in found]
        for place, built in _in_child([variants[index] for index in missing], target, told):
            found[missing[place]] = built
            if not built.error:
                _keep(files[missing[place]], built.facts)
    return [found[index] for index in range(len(variants))]


def applies(variant: Variant, target: str) -> bool:
    """True unless the variant is CUDA C++ and the target is not NVIDIA's."""
    return not isinstance(variant, CudaVariant) or cuda.applies(target)


def _file(variant: Variant, target: str, versions: str) -> Path:
    readers = [Path(str(module.__file__)).read_text() for module in READERS]
    text = "\n".join([variant.source, target, versions, *readers])
    name = hashlib.sha256(text.encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / "static-facts" / f"{name}.json"


def _keep(file: Path, facts: Facts) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and moved: another process may look for it meanwhile.
    aside = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    aside.write_text(json.dumps(facts, sort_keys=True))
    aside.replace(file)


def _in_child(variants: Sequence[Variant], target: str, told: Told) -> list[tuple[int, Built]]:
    """Results in order, up to and including the variant at which the child died, if it did."""
    child = subprocess.Popen(
        [sys.executable, "-m", "twinstep.parity.proof.gates.compile.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_root(), *sys.path])},
    )
    results: list[tuple[int, Built]] = []
    at = 0
    assert child.stdin is not None
    assert child.stdout is not None
    watch = _Watch(child)
    with child:
        child.stdin.write(pickle.dumps((target, list(variants))))
        child.stdin.close()
        for line in child.stdout:
            watch.restart()
            message = json.loads(line)
            at = message.get("start", at)
            if "done" in message:
                error = message.get("error", "")
                results.append((at, Built(variants[at], target, message.get("facts", {}), error)))
                told(results[-1][1])
        child.wait()
        watch.stop()
        if child.returncode:
            dead = Built(variants[at], target, {}, watch.cause or _death(child))
            results = [*[row for row in results if row[0] != at], (at, dead)]
            told(dead)
    return results


class _Watch:
    """Ends a child that reports nothing for too long."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.cause = ""
        self.timer = threading.Timer(PATIENCE, self._end)
        self.timer.start()

    def _end(self) -> None:
        self.cause = f"the compiler did not finish in {PATIENCE:.0f} s"
        self.child.kill()

    def stop(self) -> None:
        self.timer.cancel()

    def restart(self) -> None:
        self.timer.cancel()
        self.timer = threading.Timer(PATIENCE, self._end)
        self.timer.start()


def _death(child: subprocess.Popen[bytes]) -> str:
    assert child.stderr is not None
    last = child.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
    code = child.returncode
    how = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return " ".join(["the compiler died", how, *(f"({line})" for line in last)])


def _root() -> str:
    return str(Path(str(twinstep.__file__)).parents[1])
