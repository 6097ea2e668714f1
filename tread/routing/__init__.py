"""Rules that choose tokens, and hooks for models that can't be edited. Copy it together with routing_module.py."""
