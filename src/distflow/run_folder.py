"""The folder of a run: the names of all that is in it, and how it is made."""

from pathlib import Path

from distflow.errors import ConfigError
from distflow.util.private_folder import make_private, planted_link, why_unsafe

CONFIG = "config.yaml"
PLAN, VERSIONS, RUN = "plan.json", "versions.json", "run.json"  # what was run
METRICS = "metrics.jsonl"  # a line for each step
STATE = "state.json"  # running, finished, failed, …
SUSPICIOUS = "suspicious.jsonl"  # samples whose response may have attacked its reward
REWARDS_LOG, ENVIRONMENTS_LOG = "rewards.log", "environments.log"  # what failed in users' code
SPANS, SAMPLES = "spans", "samples"  # folders, with a file for each rank
WORKERS = "workers"  # link to the records of the workers, while they run
CHECKPOINTS = "checkpoints"  # folder with a `step_N` for each checkpoint, and beside these:
COMPLETE = "complete.json"  # in a checkpoint: written last
LATEST, BEST = "latest", "best"  # files with the number of a step
EARLIER = "earlier"  # folder of the runs that were in this folder before, 1, 2, …
# What a run that starts at step 1 moves there.
_DESCRIPTION, _LOGS = (CONFIG, PLAN, VERSIONS, RUN, STATE), (METRICS, SUSPICIOUS, REWARDS_LOG, ENVIRONMENTS_LOG)
LEFT_BY_A_RUN = (*_DESCRIPTION, *_LOGS, SPANS, SAMPLES, CHECKPOINTS)
HUGGINGFACE = "huggingface"  # in a checkpoint: its export
# What `--resume` may be besides a path.
NEWEST = "newest"  # the newest complete checkpoint of the run
AUTO = "auto"  # the same, but a run without any checkpoint starts from the beginning


def rank_file(folder: Path, kind: str, rank: int) -> Path:
    """Returns the file of a rank in `SPANS` or `SAMPLES`."""
    return folder / kind / f"{rank}.jsonl"


def checkpoint_dir(checkpoints: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of a step."""
    return checkpoints / f"step_{step}"


def make_dir(path: Path) -> None:
    """Makes the folder, for this user alone. One that exists keeps its mode, but must not be open to others' files."""
    try:
        if link := planted_link(path):
            raise ConfigError(f"run_dir: {link}; choose another one, or give the folder itself")
        make_private(path)
        unsafe = why_unsafe(path)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(f"run_dir: {path} cannot be created: {reason}; choose another one") from None
    if unsafe:
        raise ConfigError(f"run_dir: {unsafe}, so others could replace the files of the run; choose another one")
