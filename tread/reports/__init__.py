"""Reports on runs and comparisons of runs, for people."""
