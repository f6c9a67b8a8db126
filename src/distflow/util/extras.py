"""Says how to install an extra. The package is on no index: it is installed from a clone of the repository."""


def how_to_install(extra: str) -> str:
    """Returns the command, for a message that begins with what is missing."""
    return f"pip install -e '.[{extra}]' in your clone of DistFlow"
