"""A training run: its settings, start and continuation, the training step and its loss, and the work between steps."""
