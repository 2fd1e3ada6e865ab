"""What is known of other projects: edges and decisions, real bugs, differences. Data in TOML."""
