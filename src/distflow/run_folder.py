"""The folder of a run: its names, which those who write and those who read share, and how it is made."""

from pathlib import Path

from distflow.errors import ConfigError
from distflow.util.private_folder import make_private, why_unsafe

SPANS, SAMPLES = "spans", "samples"  # folders, with a file for each rank
# What `--resume` may be besides a path.
NEWEST = "newest"  # the newest complete checkpoint of the run
AUTO = "auto"  # the same, but a run without any checkpoint starts from the beginning


def make_dir(path: Path) -> None:
    """Makes the folder, for this user alone. One that exists keeps its mode, but must not be open to others' files."""
    try:
        make_private(path)
        unsafe = why_unsafe(path)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(f"run_dir: {path} cannot be created: {reason}; choose another one") from None
    if unsafe:
        raise ConfigError(f"run_dir: {unsafe}, so others could replace the files of the run; choose another one")
