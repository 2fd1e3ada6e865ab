"""Accepted values: exact ones, or intervals that follow from the formula."""
