"""Describes a run in files of its folder: config, plan, versions, seeds and hosts. Imports no torch."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import yaml

from distflow.config import Config
from distflow.plan import Plan
from distflow.run.redaction import redact, redact_word
from distflow.run_folder import CONFIG, PLAN, RUN, VERSIONS, make_dir
from distflow.util.patient_files import WholeFiles
from distflow.util.seeds import eval_seed
from distflow.util.version import __version__


def describe_run(
    config: Config,
    plan: Plan,
    hosts: Sequence[Mapping[str, str]] = (),
    files: WholeFiles | None = None,
    data_commits: Mapping[str, str] = MappingProxyType({}),
    owner: str = "",
) -> None:
    """Writes what was run: the resolved config, the plan, versions, seeds and hosts. Secrets are hidden.

    `files` tries again later if something cannot be written.
    """
    files = files or WholeFiles()
    folder = config.run_folder
    make_dir(folder)
    text = yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
    base = f"# The config of this run with all defaults and overrides. Paths are relative to {config.base.absolute()}\n"
    versions = {name: version(name) for name in ("torch", "transformers", "numpy")}
    versions = {"distflow": __version__, **versions, "python": platform.python_version()}
    run = {
        "command": [redact_word(word) for word in sys.argv],
        "folder": str(Path.cwd()),
        "base": str(config.base.absolute()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "workers": plan.workers,
        "hosts": hosts,
        "seeds": {"model": config.seed, "data": config.seed, "rollout": config.seed, "eval": eval_seed(config.seed)},
        "plan": plan.hash,
        "data": dict(data_commits),
        "owner": owner,
    }
    files.write(folder / CONFIG, base + text)
    for name, content in ((VERSIONS, versions), (PLAN, redact(plan.to_json())), (RUN, run)):
        files.write(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
