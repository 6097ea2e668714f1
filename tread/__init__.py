"""Training diffusion transformers with token routing. The core is one folder up: routing_module.py, dit.py, rf.py.

tread.load opens a trained network for sampling; see tread/doors/load.py."""


def __getattr__(name: str) -> object:
    """Import `load`, and torch with it, when it is first used. Raises AttributeError for all other names."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tread.doors.load import load

    return load
