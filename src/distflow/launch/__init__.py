"""Workers: how they start, meet, keep what they did, and end."""

from pathlib import Path

from distflow.errors import ConfigError

RESUME = "DISTFLOW_RESUME"  # in the environment of workers: where to go on from, a path or one of these
NEWEST = "newest"  # the newest whole checkpoint of the run
IF_ANY = "1"  # the same, but begin anew where there is none


def make_folder(folder: Path) -> None:
    """Of a run, or in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"run_dir: {folder} cannot be made: {why}; choose another") from None
