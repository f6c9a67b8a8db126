"""Trackers that people already use, as further sinks of the metrics: named by `track` in a config, each an extra."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from distflow.errors import ConfigError
from distflow.observe.trackers.thread import TrackerThread
from distflow.observe.trackers.tracker import RunInfo, Tracker
from distflow.util.extras import how_to_install

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


def check_installed(names: Iterable[str]) -> None:
    """Refuses trackers whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"track: {name} is not installed; {how_to_install(name)}, or remove it")


def start_trackers(trackers: Mapping[str, Mapping[str, Any]], run: RunInfo) -> list[TrackerThread]:
    """Starts a thread for each tracker, in which it is opened."""
    runs = {name: replace(run, settings=settings) for name, settings in trackers.items()}
    return [TrackerThread(name, partial(_open, name, run)) for name, run in runs.items()]


def _open(name: str, run: RunInfo) -> Tracker:
    """Opens a tracker; its module imports the package."""
    tracker: Tracker = import_module(f"{__name__}.to_{name}").open_tracker(run)
    return tracker
