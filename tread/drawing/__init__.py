"""Figures: curves, heat maps, and grids of samples."""
