"""Evaluation: loss on held-out data, and scores of pictures against a reference."""
