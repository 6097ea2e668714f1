"""Rules that choose tokens; hooks for models that can't be edited. To reuse, copy this folder and routing_module.py."""
