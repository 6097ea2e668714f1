"""Frozen networks trained by others: autoencoders, text encoders, picture encoders, CLIP and Inception."""
