"""Data sets of the hub, by the Parquet files that it makes of each; downloaded once, then read like any other files."""

import re
from functools import cache
from pathlib import Path

from distflow.errors import ConfigError, cut, short_reason, suggest

PREFIX = "hub:"
PARQUET = "refs/convert/parquet"  # the branch with the hub's Parquet files: CONFIG/SPLIT/0000.parquet
_NAME = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:/([\w.-]+)/([\w.-]+))?(?:@([\w./-]+))?")
_FORM = "hub:OWNER/NAME/CONFIG/SPLIT, for example hub:openai/gsm8k/main/train"


@cache
def download(name: str, key: str) -> Path:
    """Returns the folder with the Parquet files of a split. `name`: `hub:OWNER/NAME/CONFIG/SPLIT`, with `@COMMIT` if it
    is pinned; `key`: of the config, for errors."""
    match = _NAME.fullmatch(name)
    if not match:
        raise ConfigError(f"{key}: '{cut(name)}' is no data set of the hub; write {_FORM}")
    from huggingface_hub import snapshot_download

    repo, config, split, revision = match.groups()
    if split is None:
        raise ConfigError(f"{key}: '{name}': which config and split? Write {_FORM}{_known(repo, revision)}")
    try:
        folder = snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision or PARQUET,
            allow_patterns=f"{config}/{split}/*.parquet",
        )
    except Exception as e:  # the hub's client has many errors: not found, no access, no network, not in the cache
        raise ConfigError(
            f"{key}: the hub does not give us '{name}': {short_reason(e)}; check the name, your access (HF_TOKEN) and"
            " the network (with HF_HUB_OFFLINE=1 only what was downloaded before is there), or give files"
        ) from None
    files = Path(folder) / config / split
    if not files.is_dir():
        known = _known(repo, revision, config, split)
        raise ConfigError(f"{key}: '{repo}' has no Parquet files of '{config}/{split}'{known}")
    return files


def commit_of(files: Path) -> str:
    """Returns the commit that the folder of a split was downloaded from."""
    return files.parent.parent.name


def _known(repo: str, revision: str | None, *wanted: str) -> str:
    """Says which configs and splits there are, if the hub can be asked."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(repo, repo_type="dataset", revision=revision or PARQUET)
    except Exception:  # it is an advice only
        return ""
    splits = {name.rpartition("/")[0] for name in names if name.endswith(".parquet")}
    return suggest("/".join(wanted), splits)
