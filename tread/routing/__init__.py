"""More ways to route: other ids, and hooks for models that can't be edited. Copied together with routing_module."""
