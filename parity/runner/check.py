"""Judge a kernel, or everything that a file registers: `parity.check` and `parity check`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinstep.parity.operations.triton_names import taken_names
from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.ledger import Cell, Ledger, Status
from twinstep.parity.registry.engines import require_live_subnormals
from twinstep.parity.registry.kernels import Kernel, kernels, registrations
from twinstep.parity.registry.selection import Selection
from twinstep.parity.runner.judge_cell import Effort
from twinstep.parity.runner.judge_kernels import Session
from twinstep.parity.sequences.registry import Twin, borrowed_twins, registered_as
from twinstep.parity.sequences.session import effort_of, judge_twins, with_twins

MODULE = "parity_checked_file"


@dataclass(frozen=True)
class Verdict:
    """What the judge found.

    Attributes:
        ledger: every cell.
    """

    ledger: Ledger

    @property
    def passed(self) -> bool:
        """Whether every law was kept and everything declared has run."""
        return self.ledger.exit_code() == 0

    def failures(self) -> list[Cell]:
        """The broken cells."""
        return self.ledger.with_status(Status.FAILED)

    def __bool__(self) -> bool:
        """The same as `passed`."""
        return self.passed

    def __str__(self) -> str:
        """The verdict in one sentence, then every failure."""
        texts = [cell.failure for cell in self.failures()]
        return "\n\n".join([self.ledger.verdict(), *texts])


def check(
    kernel: Kernel | Callable[..., object],
    *,
    examples: int = Effort.examples,
    seed: int | None = None,
    engine: str | None = None,
    laws: tuple[str, ...] = (),
    repros: str | None = None,
) -> Verdict:
    """Judge one kernel by every law of its operation, or one optimizer by sequences of actions.

    Args:
        kernel: a function that `register` decorated, or its registration, or a class that
            `register_optimizer` decorated.
        examples: cases drawn for the value law; other laws draw their share of it.
        seed: of the generator; None draws the same cases in every run.
        engine: where to run; None chooses.
        laws: names of laws; empty means all of the operation's.
        repros: folder for repro files; None writes none.

    Raises:
        UsageError: the function is not registered, or an option is unknown.
    """
    selection = Selection(engine=engine, laws=laws)
    twin = registered_as(kernel)
    if twin is not None:
        how = effort_of(examples, seed, repros)
        return Verdict(with_twins(Ledger(), judge_twins(selection, [twin], how)))
    rows = [row for row in kernels() if row is kernel or row.function is kernel]
    if not rows and isinstance(kernel, Kernel):
        rows = [kernel]
    if not rows:
        name = getattr(kernel, "__name__", repr(kernel))
        raise UsageError(f"{name} is not registered; decorate it with parity.register [check]")
    effort = Effort(examples=examples, seed=seed, repros=repros)
    return Verdict(Session(selection=selection, effort=effort).run(rows))


@dataclass(frozen=True)
class Loaded:
    """What a file registers.

    Attributes:
        kernels: in order.
        twins: optimizer classes, in order.
        remarks: what is likely to go wrong, one sentence each.
    """

    kernels: list[Kernel]
    twins: list[Twin]
    remarks: list[str]


def load(path: str) -> list[Kernel]:
    """Import a file and return the kernels that it registers; see `load_file`."""
    return load_file(path).kernels


def load_file(path: str) -> Loaded:
    """Import a file and return what it registers.

    Raises:
        UsageError: the file is missing, cannot be imported, or registers nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{path} does not exist, but should be a Python file [parity check]")
    spec = importlib.util.spec_from_file_location(MODULE, file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; its name should end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    with registrations() as found, borrowed_twins() as twins:
        try:
            # A file may import its neighbours, as when it is run by itself.
            sys.path.insert(0, str(file.resolve().parent))
            spec.loader.exec_module(module)
        except UsageError:
            raise
        except SyntaxError as error:
            place = f"{error.filename}:{error.lineno}"
            raise UsageError(f"{path} has a syntax error: {error.msg} [{place}]") from None
        except (Exception, SystemExit) as error:
            raise UsageError(f"{path} cannot be imported: {_cause(error, file)}") from None
        finally:
            sys.path.remove(str(file.resolve().parent))
    require_live_subnormals(f"importing {path}")
    if not found and not twins:
        raise UsageError(
            f"{path} registers no kernel; decorate a function with @parity.register(operation)"
        )
    return Loaded(found, twins, taken_names(vars(module)))


def _cause(error: BaseException, file: Path) -> str:
    """Type and message of an exception, with the line of the file it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).name == file.name]
    place = f" [{file}:{inside[-1].lineno}]" if inside else ""
    message = (str(error).splitlines() or ["(no message)"])[0]
    return f"{type(error).__name__}: {message}{place}"
