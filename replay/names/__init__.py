"""Names: a compiled kernel run on expressions instead of values, beside its own run."""
