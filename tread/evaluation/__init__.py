"""Numbers on samples and networks: loss on held-out data, scores of pictures against a reference."""
