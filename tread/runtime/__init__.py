"""Files, devices, processes, signals, random numbers and typed settings, for all other packages; nothing on models."""
