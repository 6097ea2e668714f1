"""Pictures of numbers: curves, bars, and grids of samples."""
