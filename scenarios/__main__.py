"""`python -m scenarios`: the scenario commands."""

from __future__ import annotations

import sys

from scenarios.cli import main

if __name__ == "__main__":
    sys.exit(main())
