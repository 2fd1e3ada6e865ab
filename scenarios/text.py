"""Real text that every machine has: the source of Python's own standard library.

The modules are named here, so nothing depends on what else is installed; the text still differs
between Python versions, so its digest travels with every trace. It is read where Python was
installed and never copied; its licence is Python's own (the Python Software Foundation's).
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # one token per byte value

MODULES = (
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "difflib",
    "fractions",
    "functools",
    "heapq",
    "inspect",
    "pathlib",
    "random",
    "shutil",
    "statistics",
    "tarfile",
    "textwrap",
    "typing",
    "zipfile",
)


class TextMissing(RuntimeError):
    """The standard library's source is not on this machine."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The corpus as bytes, split once into a training part and a held-out part.

    Attributes:
        train: uint8, shape (n,), the first nine tenths.
        held_out: uint8, shape (m,), the last tenth.
        digest: SHA-256 of all bytes in order, hexadecimal.
        modules: the modules found, in the order in which they were read.
    """

    train: Tensor
    held_out: Tensor
    digest: str
    modules: tuple[str, ...]


def source_of(module: str, root: Path) -> Path | None:
    """The file that holds a module's source: `module.py`, or a package's `__init__.py`."""
    candidates = (root / f"{module}.py", root / module / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def load(root: Path | None = None) -> Text:
    """Read the corpus.

    Args:
        root: where the standard library's source lies; None asks `sysconfig`.

    Returns:
        The text. A module that this Python has moved or dropped is left out; `modules` and
        `digest` show it.

    Raises:
        TextMissing: fewer than half of the modules have source (a zipped or stripped Python).
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = [(name, path) for name in MODULES if (path := source_of(name, folder)) is not None]
    if 2 * len(found) < len(MODULES):
        raise TextMissing(
            f"{len(found)} of {len(MODULES)} standard library modules have source in {folder}, "
            "but a training text needs at least half of them: use a Python with its .py files"
        )
    data = b"\n".join(path.read_bytes() for _, path in found)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = len(data) * 9 // 10
    return Text(
        train=tokens[:cut],
        held_out=tokens[cut:],
        digest=hashlib.sha256(data).hexdigest(),
        modules=tuple(name for name, _ in found),
    )


def batch(
    tokens: Tensor, *, size: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `size` windows and the byte that follows each of their positions.

    Args:
        tokens: uint8, shape (n,) with n > context.
        size: windows per batch.
        context: bytes per window.
        generator: the only source of randomness; advanced by one draw.

    Returns:
        inputs and targets, int64, shape (size, context); targets are inputs moved on by one.
    """
    if tokens.numel() <= context:
        raise ValueError(
            f"text has {tokens.numel()} bytes, but a window of {context} needs more [text.batch]"
        )
    starts = torch.randint(tokens.numel() - context, (size, 1), generator=generator)
    inputs = starts + torch.arange(context)
    return tokens[inputs].long(), tokens[inputs + 1].long()
