"""Known causes of wrong results, each evaluated on the values of a violation before it is named."""
