"""What the rest stands on: files, devices, processes, signals, randomness, settings as types. Knows no model."""
