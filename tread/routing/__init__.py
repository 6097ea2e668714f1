"""Rules that choose tokens, and hooks for models that can't be edited. To reuse, copy this and routing_module.py."""
