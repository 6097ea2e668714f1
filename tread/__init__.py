"""Training diffusion transformers with token routing. The method itself lies beside: routing_module, dit, rf."""
