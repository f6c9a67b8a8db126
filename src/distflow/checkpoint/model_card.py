"""The model card of an export: what it was trained from, how, and how well it did. And its way to the hub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from distflow.errors import ConfigError, cut, short_reason
from distflow.run_folder import CONFIG, METRICS, VERSIONS
from distflow.util.lines import step_row

CARD = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(out: Path, run: Path, checkpoint: Path, library: str) -> None:
    """Writes the card of an export of a checkpoint; `library`: what loads it, transformers or peft."""
    step = int(checkpoint.name.rpartition("_")[2])
    text = _read(run / CONFIG)
    config = _mapping(text, yaml.safe_load)
    model = config.get("model")
    base = model.get("path") if isinstance(model, dict) else None
    head: dict[str, Any] = {"library_name": library, "tags": ["distflow", "reinforcement-learning"]}
    if library == "transformers":
        head["pipeline_tag"] = "text-generation"
    if isinstance(base, str) and _HUB_NAME.fullmatch(base) and not Path(base).exists():
        head["base_model"] = base
    flow = config.get("flow") if isinstance(config.get("flow"), str) else "a flow of its own"
    versions = ", ".join(f"{name} {v}" for name, v in _mapping(_read(run / VERSIONS), json.loads).items())
    scores = "".join(f"| `{name}` | {value:.4g} |\n" for name, value in _scores(run, step))
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {config.get('name') or run.resolve().name}\n",
        f"Trained with [DistFlow](https://arxiv.org/abs/2507.13833): flow `{flow}`, {step} steps"
        + (f", from `{base}`" if base else "")
        + f". {versions}.\n" * bool(versions),
        f"| held out | |\n| --- | --- |\n{scores}" if scores else "",
        f"The whole config:\n\n~~~~yaml\n{text.strip()}\n~~~~\n" if config else "",
    ]
    (out / CARD).write_text("\n".join(part for part in parts if part), encoding="utf-8")


def check_hub_name(repo: str) -> None:
    """Raises unless a repository of the hub can have this name."""
    if not _HUB_NAME.fullmatch(repo):
        raise ConfigError(f"push_to_hub: '{cut(repo)}' is no name on the hub; write OWNER/NAME")


def push(out: Path, repo: str, private: bool) -> None:
    """Uploads an export to the hub; the repository is made if it is not there."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(out))
    except Exception as e:  # the hub's client has many errors: no access, no network, a name that is taken
        raise ConfigError(
            f"push_to_hub: the hub does not take '{repo}': {short_reason(e)}; check the name, your access (HF_TOKEN)"
            f" and the network; the export is in {out}, and `hf upload {repo} {out}` tries again"
        ) from None


def _scores(run: Path, step: int) -> Iterator[tuple[str, float]]:
    """Yields the held-out metrics of a step."""
    for line in _read(run / METRICS).splitlines(keepends=True):
        if (row := step_row(line.encode())) and row["step"] == step:
            for name, value in row.items():
                if name.startswith("val/") and isinstance(value, int | float):
                    yield name, value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(text: str, parse_text: Any) -> dict[str, Any]:
    try:
        value = parse_text(text)
    except (ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
