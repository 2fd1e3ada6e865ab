"""Power that fails while a file is written: what had not reached the disk is lost, or is not."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Calls that change a folder, counted; at one of them something happens.

    Args:
        at: number of the call; later than the last one lets everything pass.
        fail: what happens there.
    """

    def __init__(self, at: int, fail: Callable[[Disk], None]) -> None:
        self.at, self.fail = at, fail
        self.calls: list[str] = []
        self.unsynced: dict[int, Path] = {}  # by inode
        self.renames: list[tuple[Path, bytes | None]] = []
        self.dead = False
        self._open, self._replace, self._fsync = builtins.open, os.replace, os.fsync
        self._unlink = os.unlink

    def patch(self, put: Callable[[object, str, object], None]) -> None:
        """Count from now on."""
        put(os, "unlink", self.unlink)
        put(builtins, "open", self.open)
        put(os, "replace", self.replace)
        put(os, "fsync", self.fsync)

    def count(self, name: str) -> bool:
        """Note a call; True where it is the one at which something happens."""
        self.calls.append(name)
        return len(self.calls) == self.at

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """A file whose writes are counted, if it is written."""
        if not set(mode) & set("wxa"):
            return self._open(file, mode, *args, **options)
        if self.count("open"):
            self.fail(self)
        raw = _Raw(self, file, mode.replace("b", ""))
        self.unsynced[os.fstat(raw.fileno()).st_ino] = raw.path
        return io.BufferedWriter(raw, 512)

    def replace(self, source: Any, target: Any) -> None:
        """A rename, which only the folder's fsync makes last."""
        if self.count("replace"):
            self.fail(self)
        target = Path(target)
        self.renames.append((target, target.read_bytes() if target.exists() else None))
        inode = os.stat(source).st_ino
        self._replace(source, target)
        if inode in self.unsynced:
            self.unsynced[inode] = target

    def fsync(self, descriptor: int) -> None:
        """A file, or a folder with its names."""
        if self.count("fsync"):
            self.fail(self)
        inode = os.fstat(descriptor).st_ino
        if inode in self.unsynced:
            del self.unsynced[inode]
        else:
            self.renames.clear()

    def unlink(self, path: Any, **options: Any) -> None:
        """A file removed."""
        if not self.dead:
            self._unlink(path, **options)

    def lose(self, dice: random.Random) -> None:
        """Lose a part of everything that has not reached the disk."""
        for path, before in reversed(self.renames):
            if dice.random() < 0.5 and before is not None:
                path.write_bytes(before)
                self.unsynced = {i: p for i, p in self.unsynced.items() if p != path}
        for path in self.unsynced.values():
            if path.exists():
                os.truncate(path, dice.randint(0, path.stat().st_size))


class _Raw(io.FileIO):
    """Bytes that go straight to the operating system."""

    def __init__(self, disk: Disk, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self.disk, self.path = disk, Path(file)

    def write(self, data: Any) -> int:
        """Some of the bytes, where it is this call that fails."""
        if self.disk.dead:
            return len(data)
        self.disk.unsynced[os.fstat(self.fileno()).st_ino] = self.path
        if self.disk.count("write"):
            super().write(bytes(data)[: len(data) // 2])
            self.disk.fail(self.disk)
        return super().write(data)


class PowerFails(BaseException):
    """The end of a process that does not know it."""


def cut(save: Callable[[], None], at: int, seed: int, *, kill: bool = False) -> bool:
    """Save while power fails at a call; True if the save came to its end before.

    Args:
        save: is called once.
        at: number of the call.
        seed: of what is lost.
        kill: in a child, which is killed. Otherwise here, where nothing that runs after the call,
            `finally` included, changes a file any more.
    """

    def dies(disk: Disk) -> None:
        disk.lose(random.Random(seed))
        disk.dead = True
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise PowerFails

    if kill:
        return _in_a_child(lambda: _saved(save, Disk(at, dies)))
    return _saved(save, Disk(at, dies))


def _saved(save: Callable[[], None], disk: Disk) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        disk.patch(patch.setattr)
        try:
            save()
        except BaseException:
            # torch may raise something of its own over this.
            if not disk.dead:
                raise
            return False
    return True


def _in_a_child(run: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which the child does not use.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


def full(disk: Disk) -> None:
    """A disk without room."""
    raise OSError(errno.ENOSPC, "No space left on device")
