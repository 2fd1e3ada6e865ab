"""Opt-in checks of memory: races, and reads of bytes that nothing has written."""
