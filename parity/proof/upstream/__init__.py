"""Knowledge of other projects as data: edges and decisions, real bugs, differences."""
