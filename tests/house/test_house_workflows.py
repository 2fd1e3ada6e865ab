"""Workflows of GitHub: files and scripts can be read, and name commands and inputs that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.source import ROOT
from twinstep.benchmarks.bench import parser

yaml: Any = pytest.importorskip("yaml", reason="PyYAML, which pre-commit brings, is missing")
ACTION = ROOT / ".github" / "actions" / "bench" / "action.yml"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(file: Path) -> dict[str, Any]:
    """A file of YAML; `on` is True there, as YAML 1.1 has it."""
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def steps(file: Path) -> Iterator[dict[str, Any]]:
    """Steps of all jobs, or of an action."""
    document = read(file)
    for job in document.get("jobs", {"": document.get("runs")}).values():
        yield from job["steps"]


def test_benchmarks_run_on_every_change_on_both_kinds_of_machine_and_peers_every_week() -> None:
    documents: dict[str, dict[Any, Any]] = {file.stem: read(file) for file in WORKFLOWS}
    assert documents.keys() == {"benchmarks", "peers"}
    assert set(documents["peers"][True]) == {"schedule", "workflow_dispatch"}
    document = documents["benchmarks"]
    assert set(document[True]) == {"pull_request", "push"}
    runners = {name: job["runs-on"] for name, job in document["jobs"].items()}
    assert runners == {"cpu": "ubuntu-latest", "gpu": ["self-hosted", "gpu"]}


@pytest.mark.parametrize("file", [*WORKFLOWS, ACTION], ids=lambda file: file.name)
def test_every_step_uses_or_runs_something_that_bash_reads(file: Path) -> None:
    for step in steps(file):
        assert ("uses" in step) != ("run" in step), step
        if "run" in step:
            assert step.get("shell", "") == ("bash" if file == ACTION else "")
            assert "${{" not in step["run"], "an expression in a script is an injection"
            bash = shutil.which("bash") or "bash"
            done = subprocess.run([bash, "-n"], input=step["run"], text=True, capture_output=True)
            assert done.returncode == 0, done.stderr


def test_what_is_used_is_pinned_or_ours() -> None:
    for file in (*WORKFLOWS, ACTION):
        for step in steps(file):
            used = step.get("uses", "@v0")
            assert re.search(r"@v\d+$", used) or (ROOT / used / "action.yml").is_file(), used


def test_inputs_that_are_given_exist() -> None:
    known = set(read(ACTION)["inputs"])
    assert known == {"file", "baseline", "arguments", "python"}
    for file in WORKFLOWS:
        for step in steps(file):
            if step.get("uses", "").startswith("./"):
                assert set(step.get("with", ())) <= known


def test_commands_in_the_scripts_have_the_flags_that_they_are_given() -> None:
    helped = {}
    for words in (["gate"], ["run"]):
        (command,) = [a for a in parser()._actions if a.choices]
        choices: Any = command.choices
        helped[words[0]] = choices[words[0]].format_help()
    seen = 0
    for file in (*WORKFLOWS, ACTION):
        for step in steps(file):
            for name, rest in re.findall(r"bench (gate|run)((?:\\\n|[^\n])*)", step.get("run", "")):
                for flag in re.findall(r"(?<!\S)--[a-z-]+", rest):
                    assert flag in helped[name], flag
                    seen += 1
    assert seen >= 6
