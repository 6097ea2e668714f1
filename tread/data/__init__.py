"""Data: from photos to latents on disk, other people's formats, and the way from disk to a batch."""
