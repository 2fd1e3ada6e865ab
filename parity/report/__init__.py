"""Results: the table on the screen, JSON, JUnit XML, bytes, the cells that must be judged."""
