"""`python -m parity`."""

from __future__ import annotations

from parity.cli import main

if __name__ == "__main__":
    main()
