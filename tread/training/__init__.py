"""Training: the settings of a run, its start, what a step minimises, and what happens between steps."""
