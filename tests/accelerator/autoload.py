"""Gives every Python process the rehearsal's device as soon as it imports torch, as packages of accelerators do."""

import os
from pathlib import Path


def register() -> None:
    """Is called by torch, for the entry point that `environment` makes."""
    from accelerator import rehearsal_device

    rehearsal_device.device()
    if "RANK" in os.environ:  # a worker, which sees one device, as if it were its own
        os.environ.pop("LOCAL_WORLD_SIZE", None)


def environment(folder: Path) -> dict[str, str]:
    """Returns what has to be set for processes; `folder` gets a package that has the entry point."""
    package = folder / "rehearsal_device-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: rehearsal-device\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nrehearsal = accelerator.autoload:register\n")
    tests = Path(__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(tests), os.environ.get("PYTHONPATH", "")])}
