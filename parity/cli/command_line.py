"""Errors of a command line that need no torch to be found: names, input file, output files."""

from __future__ import annotations

import ast
import json
import os
import secrets
import tokenize
from collections.abc import Collection, Sequence
from pathlib import Path

from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.names import ENGINES, unknown
from twinstep.parity.records.standalone import FOLDER

JUDGE = Path(__file__).resolve().parents[1]
SEQUENCES = "sequences"


def check_names(flag: str, asked: Sequence[str] | None, known: Collection[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        UsageError: with the nearest known name.
    """
    for value in asked or ():
        if known and value not in known:
            raise unknown(flag, value, known, "parity list")


def check_engine(engine: str | None) -> None:
    """Refuse an unknown engine.

    Raises:
        UsageError: with the engines that there are.
    """
    if engine is not None:
        check_names("--engine", [engine], ENGINES)


def seed_from(text: str | None) -> int | None:
    """The seed that a word asks for: a number, or one drawn anew for `random`.

    Raises:
        UsageError: it is neither.
    """
    if text == "random":
        return secrets.randbelow(2**32)
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    raise UsageError(f'--seed is {text}, but should be a number from 0 on, or the word "random"')


def known_laws() -> set[str]:
    """Names of the laws, each of which has a file, and of the one for whole optimizers."""
    return {path.stem for path in (JUDGE / "laws").glob("[a-z]*.py")} | {SEQUENCES}


def known_of_ours() -> tuple[set[str], set[str], set[str]]:
    """Operations, kernels and dtype combinations of our own, as the declared cells name them."""
    try:
        rows = json.loads((JUDGE / "report" / "declared_cells.json").read_text())
    except (OSError, ValueError):
        return set(), set(), set()
    dtypes = {dtype for row in rows.values() for key in row for dtype in key.split(", ")}
    return {name.partition(".")[2] for name in rows}, set(rows), dtypes - {"arithmetic"}


def check_input(path: str) -> None:
    """Refuse a file that cannot hold kernels, without running it.

    Raises:
        UsageError: it is missing, a folder, no text, empty or no Python.
    """
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"{path} is a folder, but should be a Python file [parity check]")
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist, but should be a Python file [parity check]"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror} [parity check]") from None
    if file.suffix != ".py":
        raise UsageError(f"{path} is not a Python file; its name should end with .py")
    if b"\0" in data:
        raise UsageError(f"{path} is a binary file, but should be Python source [parity check]")
    try:
        with tokenize.open(file) as lines:
            text = lines.read()
    except (SyntaxError, UnicodeDecodeError):
        raise UsageError(
            f"{path} is not UTF-8 text, but declares no other encoding [parity check]"
        ) from None
    if not text.strip():
        raise UsageError(f"{path} is empty, but should register a kernel [parity check]")
    try:
        ast.parse(text, path)
    except SyntaxError as error:
        raise UsageError(
            f"{path} has a syntax error: {error.msg} [{path}:{error.lineno}]"
        ) from None


def check_outputs(json_to: str | None, junit_to: str | None) -> None:
    """Refuse a report that could not be written when the run is over.

    Raises:
        UsageError: a path cannot be written, or both reports have the same one.
    """
    if json_to is not None and json_to == junit_to:
        raise UsageError(f"--json and --junitxml both write {json_to}, but need a place each")
    for flag, path in (("--json", json_to), ("--junitxml", junit_to)):
        if path is not None and path != "-":
            _check_writable(flag, Path(path))


def check_repros() -> None:
    """Refuse to judge where no file that shows a failure again could be written.

    Raises:
        UsageError: the folder of these files cannot be written, or cannot be made.
    """
    home = Path(FOLDER)
    if home.exists() and not home.is_dir():
        raise UsageError(f"{FOLDER} is a file, but should be the folder of repro files, or free")
    place = home if home.exists() else Path.cwd()
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(
            f"{FOLDER} should be a folder that repro files can be written to, but {place} cannot be"
        )


def _check_writable(flag: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
