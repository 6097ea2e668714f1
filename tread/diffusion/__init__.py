"""Diffusion processes, their solvers, guidance and sampling. Rectified flow is in rf.py in the repository's root."""
