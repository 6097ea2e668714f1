"""What stored numbers mean, and the way from disk to a batch."""
