"""One call of a kernel: made with limits, watched, and away from the judge where it is a user's."""
