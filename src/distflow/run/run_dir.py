"""The folder of a run: made before the first worker starts, and described by rank 0. Imports no torch."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from distflow.config import Config
from distflow.engine.role_context import eval_seed
from distflow.errors import ConfigError
from distflow.plan import Plan
from distflow.private_folder import make_private, why_unsafe
from distflow.run.files import write_atomically
from distflow.run.redaction import redact, redact_word

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


def describe_run(config: Config, plan: Plan, hosts: Sequence[Mapping[str, str]] = ()) -> None:
    """Writes what was run: the resolved config, the plan, versions, seeds and hosts. Secrets are hidden."""
    folder = config.run_folder
    make_dir(folder)
    text = yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
    base = f"# The config of this run with all defaults and overrides. Paths are relative to {config.base.absolute()}\n"
    versions = {name: package_version(name) for name in ("torch", "transformers", "numpy")}
    versions = {"distflow": package_version("distflow-rl"), **versions, "python": platform.python_version()}
    run = {
        "command": [redact_word(word) for word in sys.argv],
        "folder": str(Path.cwd()),
        "base": str(config.base.absolute()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "workers": plan.workers,
        "hosts": hosts,
        "seeds": {"model": config.seed, "data": config.seed, "rollout": config.seed, "eval": eval_seed(config.seed)},
        "plan": plan.hash,
    }
    write_atomically(folder / "config.yaml", base + text)
    for name, content in (("versions", versions), ("plan", redact(plan.to_json())), ("run", run)):
        write_atomically(folder / f"{name}.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def package_version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # used from its source folder
        return "unknown"
