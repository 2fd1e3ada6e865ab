"""The judge judged: imported by the composition root, the commands and tests alone."""
