"""Training diffusion transformers with token routing. The method is one folder up: routing_module.py, dit.py, rf.py."""
