"""A user's file, imported for the kernels and optimizers that it registers."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from twinstep.parity.operations.triton_names import taken_names
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.engines import require_live_subnormals
from twinstep.parity.registry.kernels import Kernel, kernels, registrations
from twinstep.parity.sequences.registry import Twin, borrowed_twins, twins

MODULE = "parity_checked_file"


@dataclass(frozen=True)
class Loaded:
    """Registrations of one file.

    Attributes:
        kernels: in order.
        twins: optimizer classes, in order.
        remarks: what is likely to go wrong, one sentence each.
    """

    kernels: list[Kernel]
    twins: list[Twin]
    remarks: list[str]


def load_file(path: str) -> Loaded:
    """Import a file into this process and return what it registers, which is then forgotten.

    Raises:
        UsageError: see `import_file`.
    """
    with registrations() as found, borrowed_twins() as classes:
        remarks = import_file(path)
    given = [replace(kernel, source=source_of(path)) for kernel in found]
    return Loaded(given, [replace(twin, source=source_of(path)) for twin in classes], remarks)


class _Source(SourceFileLoader):
    """Source alone: bytecode of a file as long, saved in the same second, would be taken for it."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file as it is now."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def source_of(path: str) -> str:
    """The file as a stand-alone repro names it."""
    return str(Path(path).resolve())


def import_file(path: str) -> list[str]:
    """Import a file for its registrations; remarks on what is likely to go wrong.

    Raises:
        UsageError: the file is missing, cannot be imported, or registers nothing.
    """
    file, before = Path(path), len(registered())
    if not file.is_file():
        raise UsageError(f"{path} does not exist, but should be a Python file [parity check]")
    if file.suffix != ".py":
        raise UsageError(f"{path} is not a Python file; its name should end with .py")
    try:
        module = _imported(file.resolve())
    except UsageError:
        raise
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise UsageError(f"{path} has a syntax error: {error.msg} [{place}]") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} cannot be imported: {_cause(error, file)}") from None
    require_live_subnormals(f"importing {path}")
    if len(registered()) == before:
        raise UsageError(
            f"{path} registers no kernel; decorate a function with @register(operation) "
            "of twinstep.parity"
        )
    return taken_names(vars(module))


def _imported(file: Path) -> ModuleType:
    """The module of a file, which may import its neighbours as when it is run by itself."""
    package, root = _package(file)
    name = f"{package}.{file.stem}" if package else MODULE
    with _first_on_path(root):
        if package:
            # It may import the file itself.
            importlib.import_module(package)
            if name in sys.modules:
                return sys.modules[name]
        loader = _Source(name, str(file))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loader.exec_module(module)
        return module


def _package(file: Path) -> tuple[str, Path]:
    """The package of a file that imports relative to it, or nothing; the folder to import from."""
    nodes = ast.walk(ast.parse(file.read_bytes(), str(file)))
    folder = file.parent
    if not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes):
        return "", folder
    names: list[str] = []
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Import from a folder first inside, and last afterwards: a kernel may import when called."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def registered() -> tuple[Kernel | Twin, ...]:
    """Everything that is registered in this process."""
    return (*kernels(), *twins())


def _cause(error: BaseException, file: Path) -> str:
    """Type and message of an exception, with the line of the file it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).name == file.name]
    place = f" [{file}:{inside[-1].lineno}]" if inside else ""
    if isinstance(error, ModuleNotFoundError) and error.name == "parity":
        return f"import twinstep.parity, not parity{place}"
    message = (str(error).splitlines() or ["(no message)"])[0]
    return f"{type(error).__name__}: {message}{place}"
