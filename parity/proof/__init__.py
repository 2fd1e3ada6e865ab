"""The judge judged."""
