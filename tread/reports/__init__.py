"""Pages and comparisons of runs, for people."""
