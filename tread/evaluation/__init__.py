"""Measures networks and samples: loss on held-out data, scores of pictures against a reference."""
