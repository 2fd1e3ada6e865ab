"""Other projects' tests of optimizers, run against ours."""
