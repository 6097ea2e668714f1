"""Checkpoints: writing, finding and loading them, the networks they describe, and other people's weights."""
