"""Checkpoints: writing, finding and loading them, the networks they describe, and weights of other people."""
