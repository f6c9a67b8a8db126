"""Handles files of an earlier run in the folder of a new one, compares the configs of two runs. Imports no torch."""

import json
import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import yaml

from distflow.config import Config
from distflow.config.differences import flat
from distflow.errors import ConfigError, cut, short_reason
from distflow.run.redaction import redact
from distflow.run_folder import CHECKPOINTS, CONFIG, EARLIER, LEFT_BY_A_RUN, METRICS, RUN, make_dir

logger = logging.getLogger(__name__)
_SHOWN = 12  # changed keys
_UNSET = "unset"


def keep_earlier_run(folder: Path, owner: str = "") -> None:
    """Moves an earlier run in this folder out of the way, as a whole, and says where it is kept.

    An attempt of the same owner is no earlier run: it is begun again, in its own files.
    """
    if not any((folder / name).exists() for name in (METRICS, CHECKPOINTS)) or (owner and _owner(folder) == owner):
        return
    target = next(path for n in count(1) if not (path := folder / EARLIER / str(n)).exists())
    name = ""
    try:
        make_dir(folder / EARLIER)
        make_dir(target)
        for name in LEFT_BY_A_RUN:
            if (folder / name).exists():
                (folder / name).rename(target / name)
    except OSError as e:
        raise ConfigError(
            f"run_dir: {folder / name} of an earlier run cannot be moved to {target}: {short_reason(e)}; choose another"
            " run_dir"
        ) from None
    logger.info("the earlier run in %s is kept in %s; to continue a run, use --resume", folder, target)


def _owner(folder: Path) -> str | None:
    """Returns the owner of the run that is described in a folder, if that can be read."""
    try:
        described = json.loads((folder / RUN).read_text())
    except (OSError, ValueError):
        return None
    return described.get("owner") if isinstance(described, dict) else None


def say_changes(written: Path, config: Config) -> None:
    """Says how the config differs from the one that a run was written with, if that is known in its folder."""
    if changes := list(_changes(written, config)):
        more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        logger.info("changed since %s: %s%s", written / CONFIG, ", ".join(changes[:_SHOWN]), more)


def _changes(written: Path, config: Config) -> Iterator[str]:
    try:
        before = yaml.safe_load((written / CONFIG).read_text())
        known = Config.model_validate(before | {"base": config.base}).model_dump(mode="json")
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # of another version, or damaged; the run needs none
        return
    old, new = (dict(flat(redact(c))) for c in (known, config.model_dump(mode="json")))
    for key in dict.fromkeys([*new, *old]):
        a, b = (cut(json.dumps(c[key]), 40) if c.get(key) is not None else _UNSET for c in (old, new))
        if a != b and key != "run_dir":
            yield f"{key} {a} → {b}"
