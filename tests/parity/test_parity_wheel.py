"""Twinstep as a wheel, beside a project that has folders of the same names."""

from __future__ import annotations

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


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"twinstep"}
    assert "twinstep/reference/adam.py" in names


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
