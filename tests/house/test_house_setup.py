"""Set-up on machines that are not this one: every outcome, with the machine's answers made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.environment import RECIPE, Environment, Refusal, describe, last_line
from tools.machine import Answer, Machine
from tools.requirements import OPTIONAL, REQUIRED, release, unsuitable
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
PINNED = {**dict.fromkeys(OPTIONAL, "1.0"), **GPU_BOX, "torch": "2.13.0", "triton": "3.7.1"}


@dataclass(frozen=True)
class Fake(Machine):
    """A machine of which everything is known."""

    installed: dict[str, str] = field(default_factory=dict)
    online: bool = True
    venv: bool = True
    pip: str = ""
    gpu: bool = False
    compiler: bool = True
    header: bool = True
    commands: list[str] = field(default_factory=list)

    def run(self, command: Sequence[str], seconds: float | None = None) -> Answer:
        """Answer as pip, venv and the survey would."""
        line = " ".join(command)
        self.commands.append(line)
        if "importlib.metadata" in line:
            inside = command[0].startswith(str(self.root))
            return Answer(0, json.dumps(PINNED if inside else self.installed))
        if "import venv, ensurepip" in line:
            return Answer(0 if self.venv else 1, "")
        if "-m venv" in line:
            (self.root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
            shutil.copy("/bin/sh", self.root / ".venv" / "bin" / "python")
            return Answer(0, "")
        if "pip download" in line:
            return Answer(0 if self.online else 1, "")
        if "pip install" in line:
            return Answer(0, "") if self.online and not self.pip else Answer(1, self.pip)
        return Answer(0, "")

    def interpreter(self) -> str:
        """An interpreter outside the checkout."""
        return "/usr/bin/python3"

    def has_gpu(self) -> bool:
        """As made up."""
        return self.gpu

    def has_compiler(self) -> bool:
        """As made up."""
        return self.compiler

    def has_python_header(self) -> bool:
        """As made up."""
        return self.header

    def ran(self, words: str) -> bool:
        """Whether a command with these words was run."""
        return any(words in line for line in self.commands)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files that set-up reads."""
    for name in RECIPE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_where_a_registry_answers_the_pinned_versions_are_installed_once(checkout: Path) -> None:
    fake = Fake(checkout)
    outcome = Environment(checkout, fake).set_up()
    assert (outcome.mode, outcome.reason) == ("pinned", "")
    assert sum("pip install" in line for line in fake.commands) == 1
    (line,) = [line for line in fake.commands if "pip install" in line]
    assert f"--constraint {checkout / 'constraints.txt'}" in line


def test_a_second_run_asks_nothing_of_the_machine(checkout: Path) -> None:
    Environment(checkout, Fake(checkout)).set_up()
    again = Fake(checkout)
    Environment(checkout, again).set_up()
    assert again.commands == []


@pytest.mark.parametrize("name", RECIPE)
def test_a_changed_recipe_runs_set_up_again(checkout: Path, name: str) -> None:
    Environment(checkout, Fake(checkout)).set_up()
    with (checkout / name).open("a") as file:
        file.write("\n# changed\n")
    again = Fake(checkout)
    Environment(checkout, again).set_up()
    assert again.ran("pip install")
    assert not again.ran("--clear"), "a working venv was emptied"


def test_offline_with_torch_uses_what_is_installed_and_installs_nothing(checkout: Path) -> None:
    fake = Fake(checkout, installed=GPU_BOX, online=False)
    environment = Environment(checkout, fake)
    outcome = environment.set_up()
    assert (outcome.mode, outcome.reason) == ("installed", "pip reaches no package registry")
    assert not fake.ran("pip install")
    assert 'exec "/usr/bin/python3" "$@"' in environment.python.read_text()
    assert os.access(environment.python, os.X_OK)
    said = describe(outcome, 0.0)
    assert "torch 2.11.0+cu130, triton 3.6.0" in said
    for name in ("ruff", "mypy", "import-linter"):
        assert f"{name} ({OPTIONAL[name]})" in said


def test_offline_without_torch_is_refused_with_what_to_do(checkout: Path) -> None:
    with pytest.raises(
        Refusal, match=r"no torch, no triton.*make PYTHON=/path/to/python3"
    ) as caught:
        Environment(checkout, Fake(checkout, installed={"numpy": "2.5"}, online=False)).set_up()
    assert "\n" not in str(caught.value)


def test_a_finished_offline_set_up_can_be_made_pinned_later(checkout: Path) -> None:
    Environment(checkout, Fake(checkout, installed=GPU_BOX, online=False)).set_up()
    online = Fake(checkout, installed=GPU_BOX)
    outcome = Environment(checkout, online, choice="pinned").set_up()
    assert outcome.mode == "pinned"
    assert online.ran("--clear"), "our own two-line script has to make way"


def test_without_a_venv_module_what_is_installed_will_do(checkout: Path) -> None:
    outcome = Environment(checkout, Fake(checkout, installed=GPU_BOX, venv=False)).set_up()
    assert outcome.mode == "installed"
    assert "python3-venv" in outcome.reason


def test_without_a_venv_module_and_torch_the_remedy_is_named(checkout: Path) -> None:
    with pytest.raises(Refusal, match="apt install python3-venv"):
        Environment(checkout, Fake(checkout, venv=False)).set_up()


def test_a_broken_pip_is_quoted(checkout: Path) -> None:
    pip = "Collecting torch\nERROR: No matching distribution found for torch==2.13.0\nnote: x"
    with pytest.raises(Refusal, match="No matching distribution found for torch==2.13.0"):
        Environment(checkout, Fake(checkout, pip=pip)).set_up()
    assert pip in (checkout / ".venv" / "setup.log").read_text()


def test_a_broken_pip_falls_back_to_what_is_installed(checkout: Path) -> None:
    fake = Fake(checkout, installed=GPU_BOX, pip="ERROR: disk full")
    outcome = Environment(checkout, fake).set_up()
    assert (outcome.mode, "disk full" in outcome.reason) == ("installed", True)


def test_insisting_on_pinned_never_falls_back(checkout: Path) -> None:
    fake = Fake(checkout, installed=GPU_BOX, pip="ERROR: disk full")
    with pytest.raises(Refusal, match="disk full"):
        Environment(checkout, fake, choice="pinned").set_up()


def test_choosing_installed_touches_no_network(checkout: Path) -> None:
    fake = Fake(checkout, installed=GPU_BOX)
    assert Environment(checkout, fake, choice="installed").set_up().mode == "installed"
    assert not fake.ran("pip")


def test_a_named_interpreter_replaces_another_one(checkout: Path) -> None:
    Environment(checkout, Fake(checkout)).set_up()
    stamp = checkout / ".venv" / "twinstep.json"
    stamp.write_text(stamp.read_text().replace("/usr/bin/python3", "/usr/bin/python3.14"))
    kept, replaced = Fake(checkout), Fake(checkout)
    Environment(checkout, kept).set_up()
    Environment(checkout, replaced, insist=True).set_up()
    assert kept.commands == []
    assert replaced.ran("--clear")


@pytest.mark.parametrize(
    ("lacks", "remedy"), [("compiler", "install gcc or clang"), ("header", "python3-dev")]
)
def test_a_gpu_without_the_means_to_launch_is_refused(
    checkout: Path, lacks: str, remedy: str
) -> None:
    fake = Fake(checkout, gpu=True, compiler=lacks != "compiler", header=lacks != "header")
    with pytest.raises(Refusal, match=remedy):
        Environment(checkout, fake).set_up()


def test_without_a_gpu_no_compiler_is_needed(checkout: Path) -> None:
    Environment(checkout, Fake(checkout, compiler=False, header=False)).set_up()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.8.1"}, "torch 2.8.1 is older than 2.9"),
        ({"triton": "3.10.0"}, "triton 3.10.0 is untested, needs < 3.10"),
        ({"triton": "3.5.1"}, "triton 3.5.1 is older than 3.6"),
        ({"rich": None}, "no rich"),
        ({}, ""),
    ],
)
def test_versions_that_will_not_do_are_named(change: dict[str, str | None], words: str) -> None:
    found = {name: version for name, version in {**GPU_BOX, **change}.items() if version}
    assert unsuitable(found) == words


def test_release_reads_the_leading_numbers() -> None:
    assert release("2.11.0+cu130") == (2, 11, 0)
    assert release("3.7.0rc1") == (3, 7)


def test_the_last_line_prefers_an_error() -> None:
    assert last_line("ERROR: a.\n  note: b\n") == "ERROR: a"
    assert last_line("") == "no output"


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert set(REQUIRED) | set(OPTIONAL) <= set(pins)
    assert unsuitable(pins) == ""
    assert all(version and "+" not in version for version in pins.values())


def run_door(code: str, search_path: str) -> subprocess.CompletedProcess[str]:
    """Run tools/setup_env.py's `main` under a made-up version of Python."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tools import setup_env\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )


OLD = "sys.version_info = (3, 8, 1)\nsys.exit(setup_env.main())"


def test_too_old_a_python_is_one_sentence_and_exit_code_2() -> None:
    done = run_door(OLD, "/nonexistent")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "is 3.8" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_a_newer_python_on_the_path_takes_over(tmp_path: Path) -> None:
    broken, newer = tmp_path / "python3.11", tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\nexit 127\n")
    newer.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "took over: $2"\n')
    for program in (broken, newer):
        program.chmod(0o755)
    done = run_door("sys.argv = ['x', '--choice=auto']\n" + OLD, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "took over: --choice=auto\n")


def test_the_door_opens_for_every_python_that_it_turns_away() -> None:
    """No syntax younger than Python 2.7: f-strings, annotations, `with` in parentheses."""
    text = (ROOT / "tools" / "setup_env.py").read_text()
    compile(text, "setup_env.py", "exec")
    assert 'f"' not in text
    assert "->" not in text.replace("# type: (str) -> str", "").replace("# type: () -> int", "")
