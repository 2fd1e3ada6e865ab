"""The profile under which tests run, as conftest.py registers them."""

from __future__ import annotations

from hypothesis import settings

# `make property`: many examples, drawn anew.
LONG = settings.get_current_profile_name() == "property"
