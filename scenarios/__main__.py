"""`python -m twinstep.scenarios`: the scenario commands."""

from __future__ import annotations

import sys

from twinstep.scenarios.cli import main

if __name__ == "__main__":
    sys.exit(main())
