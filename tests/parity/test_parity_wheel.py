"""Twinstep as a wheel, beside a project that has folders of the same names."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.source import ROOT, project_files

CLASHING = ("contract", "fast", "golden", "parity", "reference", "replay", "scenarios", "tests")
KERNEL = """
import fast, reference
from twinstep.parity import register

assert fast.OWNER == reference.OWNER == "theirs"


@register("cast_copy", dtypes=("bf16",))
def my_cast(sources, copies):
    for source, copy in zip(sources, copies, strict=True):
        copy.copy_(source)
"""
TEST = """
import my_kernel, parity


def test_cast(parity_check):
    assert parity.OWNER == "theirs"
    parity_check(my_kernel.my_cast)
"""


# Each command that README names, with arguments that make it cheap: about 10 s, 20 s for the first.
CHECKED = ("my_kernel.py", "--dtype", "bf16", "--jobs", "1", "--examples", "2")
COMMANDS: list[tuple[str, ...]] = [
    ("bench", "gate", "my_kernel.py", "--baseline", "HEAD", "--counts"),
    ("check", *CHECKED, "--law", "value"),
    ("doctor",),
    ("golden", "verify", "deepspeed_flat_clipped"),
    ("list",),
    ("model-check", "--sample", "1000"),
    ("prove", "my_kernel.py", "--dtype", "bf16", "--jobs", "1"),
    ("prove", "--sizes", "my_kernel.py", "--dtype", "bf16"),
    ("prove", "--configurations", "my_kernel.py", "--dtype", "bf16"),
    ("scenario", "run", "overflow_burst", "--side", "reference", "--steps", "50"),
    ("traffic", "--kernel", "fast.cast_copy", "--params", "1000"),
]
OURS = """
from twinstep.parity import register


@register("cast_copy", dtypes=("bf16",))
def my_cast(sources, copies):
    for source, copy in zip(sources, copies, strict=True):
        copy.copy_(source)
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of this interpreter in a folder, with nothing of the checkout on its path."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked tree, built in a copy: setuptools writes beside its sources."""
    pytest.importorskip("setuptools", reason="builds a wheel without a network")
    copy, folder = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for path in project_files():
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    for link in (ROOT / "twinstep").iterdir():
        if link.is_symlink():
            (copy / "twinstep" / link.name).symlink_to(link.readlink())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    done = python(copy, "-m", "pip", "wheel", "--quiet", *options, str(copy))
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"twinstep"}
    assert "twinstep/reference/adam.py" in names


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    packages = tuple(f"{link.name}/" for link in (ROOT / "twinstep").iterdir() if link.is_symlink())
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = [path for path in map(str, project_files()) if path.startswith(packages)]
    assert not [path for path in ours if f"twinstep/{path}" not in names]


def test_readme_names_the_commands_that_are_tried() -> None:
    named = set(re.findall(r"[ `/]parity ([a-z][a-z-]+)[ `]", (ROOT / "README.md").read_text()))
    assert named == {words[0] for words in COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_readme_runs_from_the_wheel(
    words: tuple[str, ...], installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that holds a kernel alone."""
    monkeypatch.setenv("PYTHONPATH", str(installed))
    where = python(tmp_path, "-c", "import twinstep.parity; print(twinstep.parity.__file__)")
    assert where.stdout.startswith(str(installed))
    (tmp_path / "my_kernel.py").write_text(OURS)
    if words[0] == "bench":
        for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm c"):
            subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
        (tmp_path / "my_kernel.py").write_text(f"{OURS}# later\n")
    done = python(tmp_path, "-m", "twinstep.parity", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_the_golden_traces(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    listed = python(tmp_path, "-m", "twinstep.parity", "golden", "list").stdout.split()
    assert listed[-2:] == [str(len(list((ROOT / "golden/traces").glob("*.jsonl")))), "traces"]


def test_beside_a_project_with_the_same_folders(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for name in CLASHING:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "theirs"\n')
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    (tmp_path / "tests" / "test_cast.py").write_text(TEST)
    # Ahead of an editable install of the checkout, which may be there too.
    where = "import twinstep.parity; print(twinstep.parity.__file__)"
    assert python(tmp_path, "-c", where).stdout.startswith(str(tmp_path))
    judged = python(tmp_path, "-m", "twinstep.parity", "check", "my_kernel.py", "--quick")
    assert judged.returncode == 0, judged.stdout + judged.stderr
    plugin = ("-p", "twinstep.parity.plugin", "--rootdir", str(tmp_path))
    tested = python(tmp_path, "-m", "pytest", "-q", *plugin, "tests/test_cast.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
