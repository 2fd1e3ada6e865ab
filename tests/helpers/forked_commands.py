"""Commands of a user in forks of one process, which has imported torch once for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from twinstep.parity.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
End = tuple[int, str, str]
"""Exit code, standard output, standard error."""


def ends_of(commands: Sequence[Sequence[str]], folder: Path) -> list[End]:
    """The end of each command, as a shell sees it."""
    program = [sys.executable, "-m", __name__, json.dumps(commands), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [cast(End, tuple(json.loads(line))) for line in done.stdout.splitlines()]


def _run(words: Sequence[str]) -> None:
    """Be one command."""
    sys.argv = list(words)
    if words[0] == "pytest":
        sys.exit(pytest.main(list(words[1:])))
    main()


def _end(words: Sequence[str], outputs: Sequence[Path]) -> int:
    """Exit code of one command in a fork; that of a signal as a shell has it."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code if code >= 0 else 128 - code
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    code = 255
    try:
        _run(words)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(commands: Sequence[Sequence[str]], folder: Path) -> None:
    from twinstep.parity.runner import fork_server, preload

    # The server of workers is a fork as well, as in a command that has imported torch itself.
    preload.preload()
    usual = fork_server.start_server
    fork_server.start_server = lambda forked=False: usual(forked=True)
    outputs = [folder / "stdout", folder / "stderr"]
    for words in commands:
        code = _end(words, outputs)
        said = [path.read_text(errors="replace") for path in outputs]
        print(json.dumps([code, *said]), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]), Path(sys.argv[2]))
