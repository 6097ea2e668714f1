"""Shared by all other packages: files, devices, processes, signals, random numbers, typed settings. No model code."""
