"""What the Makefile and the gate run besides the packages: set-up, readers of our own source."""
