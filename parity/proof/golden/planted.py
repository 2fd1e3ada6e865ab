"""Single lines of a scaler or of the finalise kernel changed, each of which a trace must name.

A copy of the packages is made with one line changed, and `parity golden verify` runs there as a
user would run it, over a few traces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("contract", "fast", "golden", "parity", "reference", "replay", "twinstep")
NAMED = re.compile(r"^(\w+), step (\d+) \((.)\), (\w+)", re.MULTILINE)
RULES, FINALISE = "fast/kernels/loss_scale.py", "fast/kernels/finalise.py"
REFERENCE = "reference/loss_scale.py"
DYNAMIC, WRAPPER, TORCH = "deepspeed_dynamic_", "deepspeed_wrapper_", "torch_"
HYSTERESIS = "deepspeed_dynamic_upstream_"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A change of one line.

    Attributes:
        name: of the fault.
        file: from the root.
        before: text that occurs there once.
        after: text in its place.
        traces: beginnings of names that are verified.
    """

    name: str
    file: str
    before: str
    after: str
    traces: tuple[str, ...]

    @property
    def side(self) -> str:
        """The side that is changed."""
        return self.file.split("/")[0]


def _row(name: str, file: str, before: str, after: str, *traces: str) -> Planted:
    return Planted(name=name, file=file, before=before, after=after, traces=traces)


PLANTED = (
    _row(
        "window off by one",
        RULES,
        "clean % window == 0)",
        "clean % (window + 1) == 0)",
        WRAPPER,
    ),
    _row(
        "first growth too early",
        RULES,
        "clean = cur_iter - last_overflow_iter - 1",
        "clean = cur_iter - last_overflow_iter",
        WRAPPER,
    ),
    _row(
        "hysteresis refilled too early", RULES, "refills = grows", "refills = ~overflow", HYSTERESIS
    ),
    _row(
        "hysteresis never refilled",
        RULES,
        "new_hysteresis = tl.where(refills, shift, new_hysteresis)",
        "new_hysteresis = tl.where(refills & overflow, shift, new_hysteresis)",
        HYSTERESIS,
    ),
    _row(
        "hysteresis spent one too soon",
        RULES,
        "(hysteresis == 1)",
        "(hysteresis <= 2)",
        HYSTERESIS,
    ),
    _row(
        "no floor", RULES, "return tl.where(floor > lower, floor, lower)", "return lower", WRAPPER
    ),
    _row(
        "last overflow remembered a step late",
        RULES,
        "new_last = tl.where(overflow, cur_iter, last)",
        "new_last = tl.where(overflow, cur_iter + 1, last)",
        HYSTERESIS,
    ),
    _row(
        "last overflow forgotten",
        RULES,
        "cur_iter + 1, tl.where(overflow, cur_iter, last)",
        "cur_iter + 1, last",
        WRAPPER,
    ),
    _row(
        "steps counted at a floor that raises",
        RULES,
        "new_iter = tl.where(stuck, cur_iter, new_iter)",
        "new_iter = tl.where(stuck, new_iter, new_iter)",
        "deepspeed_dynamic_hysteresis_spent",
    ),
    _row(
        "tracker kept at an overflow",
        RULES,
        "tl.where(overflow | due, 0, clean)",
        "tl.where(due, 0, clean)",
        "torch_interval_of_two",
        "torch_burst",
    ),
    _row("interval off by one", RULES, "clean == interval", "clean > interval", "torch_interval"),
    _row(
        "growth past fp32",
        RULES,
        'grows = due & (tl.abs(grown) < float("inf"))',
        "grows = due",
        "torch_no_growth",
    ),
    _row(
        "scale not rounded to fp32",
        RULES,
        "(scale * backoff).to(tl.float32).to(tl.float64)",
        "(scale * backoff)",
        "torch_odd",
        "torch_rounded",
    ),
    _row(
        "scale updated before unscale",
        FINALISE,
        "    applied = s\n",
        "    applied = new_scale\n",
        "deepspeed_flat_growth",
        "deepspeed_wrapper_step",
    ),
    _row(
        "skip on NaN only",
        "fast/kernels/_limbs.py",
        "return norm, (nonfinite != 0).to(tl.float32)",
        "return norm, ((nonfinite >> 32) != 0).to(tl.float32)",
        "deepspeed_zero_nan",
    ),
    _row(
        "skip on infinity only",
        "fast/kernels/_limbs.py",
        "return norm, (nonfinite != 0).to(tl.float32)",
        "return norm, ((nonfinite & 0xFFFFFFFF) != 0).to(tl.float32)",
        "deepspeed_zero_nan",
    ),
    _row(
        "norm not unscaled",
        FINALISE,
        "tl.store(norm, (scaled_norm.to(tl.float64) / applied).to(tl.float32))",
        "tl.store(norm, scaled_norm)",
        "deepspeed_flat_several",
    ),
    _row(
        "squares kept for the next step",
        FINALISE,
        "tl.store(limbs + tl.arange(0, PADDED), tl.zeros([PADDED], tl.int64))",
        "tl.debug_barrier()",
        "deepspeed_flat_several",
    ),
    _row(
        "counter advanced in a skipped step",
        "fast/kernels/_arith.py",
        "if found_inf == 0.0:",
        "if found_inf >= 0.0:",
        "deepspeed_flat_adamw",
    ),
    _row(
        "clip without the norm",
        "fast/kernels/clip.py",
        "combined = tl.where(clips, scale * c, scale)",
        "combined = tl.where(clips, scale, scale)",
        "deepspeed_flat_clipped",
    ),
    _row(
        "first growth too early",
        REFERENCE,
        "return clean > 0 and clean % scale_window == 0",
        "return clean % scale_window == 0",
        WRAPPER,
    ),
    _row(
        "hysteresis refilled too early",
        REFERENCE,
        "refills = self.consecutive_hysteresis or grows",
        "refills = True",
        HYSTERESIS,
    ),
    _row(
        "no floor",
        REFERENCE,
        "max(scale / self.scale_factor, self.min_scale), state.cur_iter",
        "scale / self.scale_factor, state.cur_iter",
        WRAPPER,
    ),
    _row(
        "growth past fp32",
        REFERENCE,
        "scale = grown if math.isfinite(grown) else state.scale",
        "scale = grown",
        "torch_no_growth",
    ),
    _row(
        "skip on NaN only",
        "reference/unscale.py",
        "~torch.isfinite(tensor)",
        "torch.isnan(tensor)",
        "deepspeed_flat_nan",
        "deepspeed_flat_burst",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Answer of verify to a change.

    Attributes:
        code: its exit code.
        first: its first line that names a trace, a step and a field; empty where there is none.
        said: all that it printed.
    """

    code: int
    first: str
    said: str


def verified_with(planted: Planted, folder: Path) -> Outcome:
    """Run `parity golden verify` in a copy of the packages with one line changed.

    Args:
        planted: the change.
        folder: an empty one, for the copy.

    Raises:
        ValueError: the text does not occur once.
    """
    for name in PACKAGES:
        # The links inside twinstep are relative: in the copy they lead to the copy.
        if name in (planted.side, "twinstep"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=_bytecode)
        else:
            (folder / name).symlink_to(ROOT / name)
    path = folder / planted.file
    source = path.read_text()
    if source.count(planted.before) != 1:
        times = source.count(planted.before)
        raise ValueError(
            f"{planted.before!r} should occur once in {planted.file}, not {times} times"
        )
    path.write_text(source.replace(planted.before, planted.after))
    return _run(folder, [*planted.traces, "--side", planted.side])


def _bytecode(folder: str, names: Sequence[str]) -> list[str]:
    del folder
    return [name for name in names if name == "__pycache__"]


def _run(folder: Path, words: Sequence[str]) -> Outcome:
    program = [sys.executable, "-m", "twinstep.parity", "golden", "verify", *words]
    where = {"PYTHONPATH": str(folder)}
    ended = subprocess.run(
        program,
        cwd=folder,
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = NAMED.search(ended.stdout)
    first = "" if found is None else ended.stdout[found.start() :].splitlines()[0]
    return Outcome(code=ended.returncode, first=first, said=ended.stdout + ended.stderr)
