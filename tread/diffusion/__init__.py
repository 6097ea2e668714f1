"""Diffusion processes, their solvers, guidance and sampling. Rectified flow lies in rf.py."""
