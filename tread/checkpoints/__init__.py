"""Checkpoints: what is written and found again, what a network is by its record, and weights of other people."""
