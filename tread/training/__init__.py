"""A run: its settings, its start, a step and what it minimises, and what happens between steps."""
