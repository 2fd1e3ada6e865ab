"""Every optimizer step of mixed-precision training, twice, and a judge of both."""
