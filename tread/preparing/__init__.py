"""Turns sources into datasets: photos, captions, latents of other projects, embedded datasets."""
