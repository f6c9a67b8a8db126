"""Names rollout engines: the package's own, and others that installed packages bring by entry point.

Imports neither torch nor an engine, so that a config can be checked anywhere.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint

from distflow.util.plugins import load_plugins

GROUP = "distflow.engines"
_BUILT_IN = {
    "builtin": f"{__package__}.builtin.engine:BuiltinEngine",
    "vllm": f"{__package__}.vllm.engine:VllmEngine",
}


def engines() -> Mapping[str, EntryPoint]:
    """Returns the class of each name, an implementation of `RolloutEngine`, which is not imported yet."""
    return load_plugins(GROUP, _BUILT_IN)
