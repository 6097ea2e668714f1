"""Networks: the parts around the blocks, and all blocks but DiT's, which are in dit.py in the top folder."""
