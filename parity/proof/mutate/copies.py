"""A copy of our kernels' modules with one file changed: the checkout's own files stay as they are.

The changed file lies in a temporary folder; every module of `fast.kernels` is imported anew around
it, and the originals are put back afterwards. Triton's cache goes to the same folder.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from twinstep import fast
from twinstep.fast.runtime.tables import SHARED
from twinstep.parity.operations.operation import LAYOUTS
from twinstep.parity.proof.mutate.sites import PACKAGE, Mutant
from twinstep.parity.registry.house_kernels import FILES, GPU_ENGINES
from twinstep.parity.registry.kernels import Kernel, register, registrations

# Where mutants share what the compiler makes of the functions that none of them changes.
CACHE = "PARITY_MUTATE_CACHE"


class _Finder:
    """Finds one module in a file of ours and no other."""

    def __init__(self, module: str, file: Path) -> None:
        self.module = module
        self.file = file

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the changed module."""
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.file)


@contextlib.contextmanager
def changed(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Import our kernels with the mutant's file in place of the original."""
    file = folder / Path(mutant.file).name
    file.write_text(mutant.source)
    importlib.invalidate_caches()
    finder = _Finder(mutant.module, file)
    originals = _taken_out()
    package = fast.kernels if hasattr(fast, "kernels") else None
    cache, bytecode = os.environ.get("TRITON_CACHE_DIR"), sys.dont_write_bytecode
    os.environ["TRITON_CACHE_DIR"] = os.environ.get(CACHE, str(folder / "triton"))
    sys.meta_path.insert(0, finder)
    # Two mutants of one file may be equally long and equally old: bytecode would mix them up.
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.dont_write_bytecode = bytecode
        _taken_out()
        sys.modules.update(originals)
        if package is not None:
            setattr(fast, "kernels", package)  # noqa: B010 - a module's attribute
        SHARED.__init__()  # type: ignore[misc]  # tables that a mutant built
        os.environ.pop("TRITON_CACHE_DIR")
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = cache


def _taken_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]
    return {name: sys.modules.pop(name) for name in names}


def kernel_of(operation: str) -> Kernel:
    """The launcher of an operation as it is importable now, with everything that ours claims."""
    from twinstep.parity.operations.table import operation_named

    module = importlib.import_module(f"{PACKAGE}.{FILES[operation]}")
    contract = operation_named(operation, module.__name__)
    with registrations() as collected:
        register(
            operation,
            name=f"mutant.{operation}",
            arithmetic="exact",
            dtypes=tuple(contract.combinations),
            layouts=LAYOUTS,
            engines=GPU_ENGINES,
        )(getattr(module, f"{operation}_"))
    return collected[0]
