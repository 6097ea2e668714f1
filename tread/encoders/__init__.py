"""Frozen networks by others: autoencoders, text encoders, picture encoders, CLIP and Inception."""
