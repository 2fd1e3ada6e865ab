"""Named scenarios: a situation, as a row of a table, and what a run in it must show, as laws."""
