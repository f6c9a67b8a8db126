"""The folder of a run: made before the first worker starts, and described by rank 0. Imports no torch."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from distflow.config import Config
from distflow.errors import ConfigError

# What `--resume` may be besides a path.
NEWEST = "newest"  # the newest complete checkpoint of the run
AUTO = "auto"  # the same, but a run without any checkpoint starts from the beginning


def make_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(f"run_dir: {path} cannot be created: {reason}; choose another one") from None


def describe_run(config: Config) -> None:
    """Writes the resolved config and the versions of what runs it."""
    folder = config.run_folder
    make_dir(folder)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    base = f"# The config of this run with all defaults and overrides. Paths are relative to {config.base.absolute()}\n"
    (folder / "config.yaml").write_text(base + text, encoding="utf-8")
    versions = {name: package_version(name) for name in ("torch", "transformers", "numpy")}
    versions = {"distflow": package_version("distflow-rl"), **versions, "python": platform.python_version()}
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def package_version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # used from its source folder
        return "unknown"
