"""The folder for what is compiled at first use."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of this package, made if it is not there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "twinstep"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
