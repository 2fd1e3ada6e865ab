"""Words on the screen: lines that hang below their head, none of them cut."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


def print_hanging(console: Console, head: str, words: Iterable[str], style: str = "") -> None:
    """Print words behind a head, and lines that follow below the first word; no word is cut."""
    indent = cell_len(head)
    line, used, empty = Text().append(head, style), indent, True
    for word in words:
        size = cell_len(word)
        if not empty and used + 1 + size > console.width:
            console.print(line, soft_wrap=True)
            line, used, empty = Text(" " * indent), indent, True
        line.append(word if empty else f" {word}")
        used, empty = used + size + (not empty), False
    line.rstrip()
    console.print(line, soft_wrap=True)
