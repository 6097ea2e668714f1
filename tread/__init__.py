"""Training diffusion transformers with token routing. The method is beside it: routing_module.py, dit.py, rf.py."""
