"""Checkpoints: writing, finding and loading them, building their networks, and loading other people's weights."""
