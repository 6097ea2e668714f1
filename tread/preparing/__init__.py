"""Turns sources into datasets: photos, captions, latents of other projects, and the built-in digits and emoji."""
