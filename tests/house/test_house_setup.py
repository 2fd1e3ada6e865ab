"""Set-up in copies of the checkout, under interpreters of which it is known what they have."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import output_of
from tools import setup_env
from tools.setup_env import DEPENDENCIES, OPTIONAL, Refusal, require_compiler, unsuitable
from tools.source import ROOT

GPU_BOX = {
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "numpy": "2.5.2",
    "hypothesis": "6.170.15",
    "rich": "15.0.0",
    "typer": "0.29.2",
    "pytest": "9.2.0",
}
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PATH": os.defpath}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files that set-up reads."""
    for name in ("constraints.txt", "pyproject.toml", "tools/setup.sh", "tools/setup_env.py"):
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, copy)
    return tmp_path / "checkout"


def interpreter(folder: Path, packages: dict[str, str]) -> Path:
    """An interpreter without pip that has these versions, as far as their metadata goes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version in packages.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        metadata = site / f"{name}-{version}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


def set_up(
    checkout: Path, python: Path | str, *options: str, path: str = os.defpath
) -> subprocess.CompletedProcess[str]:
    """The part of the Makefile that runs before every target."""
    return subprocess.run(
        ["/bin/sh", "tools/setup.sh", str(python), *options],
        cwd=checkout,
        env={**OFFLINE, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def prefix(checkout: Path) -> Path:
    """Prefix of the interpreter of `.venv`."""
    command = [str(checkout / ".venv/bin/python"), "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error of a set-up that ended in 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_offline_with_torch_uses_what_is_installed_once(checkout: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "box", GPU_BOX)
    first = set_up(checkout, python, "--need", "pytest")
    assert first.returncode == 0, first.stderr
    assert "torch 2.11.0+cu130, triton 3.6.0 (pip reaches no package registry)" in first.stdout
    for name in ("ruff", "mypy", "import-linter"):
        assert f"{name} ({OPTIONAL[name]})" in first.stdout
    assert prefix(checkout) == tmp_path / "box"
    assert set_up(checkout, python).stdout == ""
    assert "ruff, mypy not installed under" in refusal(
        set_up(checkout, python, "--need", "ruff", "mypy")
    )


def test_a_named_interpreter_replaces_another_one(checkout: Path, tmp_path: Path) -> None:
    one, other = (interpreter(tmp_path / name, GPU_BOX) for name in ("one", "other"))
    assert "(as asked)" in set_up(checkout, one, "--choice", "installed").stdout
    assert set_up(checkout, other).stdout == ""
    assert prefix(checkout) == tmp_path / "one"
    assert set_up(checkout, other, "--insist").returncode == 0
    assert prefix(checkout) == tmp_path / "other"


def test_pinned_never_falls_back_and_mends_what_is_half_made(
    checkout: Path, tmp_path: Path
) -> None:
    python = interpreter(tmp_path / "box", GPU_BOX)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("missing")
    said = refusal(set_up(checkout, python, "--choice", "pinned"))
    assert re.search(r"pip could not install .*make PYTHON=/path/to/python3", said)
    assert prefix(checkout) == checkout / ".venv"
    assert (checkout / ".venv" / "setup.log").read_text()
    # What failed left no stamp, and an ordinary run takes what is installed.
    assert "unchanged" in set_up(checkout, python).stdout
    assert prefix(checkout) == tmp_path / "box"


def test_without_torch_the_remedy_is_named(checkout: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "bare", {"numpy": "2.5"})
    said = refusal(set_up(checkout, python, "--choice", "installed"))
    assert re.search(r"no hypothesis.*no torch, no triton.*make PYTHON=/path/to/python3", said)


def test_without_a_venv_module_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "find_spec", lambda name: None)
    assert "apt install python3-venv" in setup_env.make_venv({})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.8.1"}, "torch 2.8.1 is older than 2.9"),
        ({"triton": "3.10.0"}, "triton 3.10.0 is untested, needs < 3.10"),
        ({"triton": "3.5.1"}, "triton 3.5.1 is older than 3.6"),
        ({"triton": "3.6.0rc1"}, ""),
        ({"rich": ""}, "no rich"),
        ({}, ""),
    ],
)
def test_versions_that_will_not_do_are_named(
    change: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "found", {**GPU_BOX, **change}.__getitem__)
    assert unsuitable() == words


def test_every_requirement_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert len(DEPENDENCIES) == 6
    # On a GPU machine torch brings the one that it was built with.
    assert set(OPTIONAL) - {"cuda-bindings"} <= set(pins)
    monkeypatch.setattr(setup_env, "found", pins.__getitem__)
    assert unsuitable() == ""
    assert all(version and "+" not in version for version in pins.values())


@pytest.mark.parametrize(
    ("has", "remedy"),
    [(("nvidia-smi",), "install gcc or clang"), (("nvidia-smi", "gcc"), "python3-dev")],
)
def test_a_gpu_without_the_means_to_launch_is_refused(
    has: tuple[str, ...], remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if name in has else None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(Refusal, match=remedy):
        require_compiler()


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("", "starting pip"),
        ("Obtaining file:///here\n", "starting pip"),
        ("Collecting torch<3,>=2.9 (from here)\n", "fetching torch, package 1"),
        (
            "Collecting rich>=13\n  Downloading rich-15.0.0-py3-none-any.whl (1 MB)\n"
            "Processing /wheels/import_linter-2.16-py3-none-any.whl (from here)\n",
            "fetching import_linter, package 2",
        ),
        ("Collecting rich\nInstalling collected packages: a, b, c\n", "installing 2 of 3 packages"),
    ],
)
def test_the_stage_of_an_installation_is_read_off_pip(
    output: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "installed", lambda: [Path("pip"), Path("a"), Path("b")])
    assert setup_env.stage(output, before=1) == shown


def test_ctrl_c_ends_set_up_and_what_it_started(checkout: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "box", GPU_BOX)
    command = ["/bin/sh", "tools/setup.sh", str(python), "--choice", "pinned"]
    begun = subprocess.Popen(
        command,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert begun.stdout is not None
    assert "making .venv ready" in begun.stdout.readline()
    begun.send_signal(signal.SIGINT)
    _, said = output_of(begun)
    assert begun.returncode == 130
    assert said == "set-up: interrupted; the next command begins it anew\n"
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in commands if bytes(checkout / ".venv") in words]


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_too_old_a_python_is_one_sentence_unless_a_newer_one_is_there(
    checkout: Path, tmp_path: Path
) -> None:
    program(tmp_path / "python3", 'case "$2" in *version_info*) exit 1;; *) echo 3.8.1;; esac')
    said = refusal(set_up(checkout, "python3", path=str(tmp_path)))
    assert "needs Python 3.11 or newer, but python3 is 3.8.1" in said
    assert "make PYTHON=" in said
    program(tmp_path / "python3.11", "exit 127")
    program(tmp_path / "python3.12", '[ "$1" = -c ] || echo "took over: $2 $3"')
    done = set_up(checkout, "python3", "--choice", "pinned", path=str(tmp_path))
    assert done.stdout == "took over: --choice pinned\n"
    said = refusal(set_up(checkout, "python3", "--insist", path=str(tmp_path)))
    assert f"python3 is 3.8.1: name this one with make PYTHON={tmp_path}/python3.12" in said
    assert "PYTHON, which is empty, is not on the PATH" in refusal(set_up(checkout, ""))
    assert "nowhere/python3 is not on the PATH" in refusal(set_up(checkout, "nowhere/python3"))
