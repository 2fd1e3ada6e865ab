"""The table on the screen, JSON and JUnit XML."""
