"""Networks: what stands around the blocks, and the blocks other than DiT's, which lie in dit.py."""
