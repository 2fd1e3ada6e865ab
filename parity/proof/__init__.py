"""The judge judged: imported by the composition root and by tests."""
