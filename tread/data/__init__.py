"""Prepared datasets: what the stored numbers mean, how they are written, and how they are read into batches."""
