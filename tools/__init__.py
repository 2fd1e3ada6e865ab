"""Programs of the Makefile and the gate: set-up, readers of our own source."""
