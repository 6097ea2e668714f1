"""Token routing: rules that choose tokens, and hooks for existing models. Needs only torch and routing_module.py."""
