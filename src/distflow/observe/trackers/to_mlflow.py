"""MLflow: to MLFLOW_TRACKING_URI, else to a database in the run's folder; samples as JSON."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow

from distflow.observe.trackers.tracker import COLUMNS, RunInfo


class MLflow:
    def __init__(self, run: RunInfo) -> None:
        experiment = run.settings.get("project") or os.environ.get("MLFLOW_EXPERIMENT_NAME", "distflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{run.folder.resolve() / 'mlflow.db'}")
            if mlflow.get_experiment_by_name(experiment) is None:
                mlflow.create_experiment(experiment, (run.folder.resolve() / "mlflow").as_uri())
        mlflow.set_experiment(experiment)
        self.run = mlflow.start_run(run_name=run.settings.get("name") or run.name)
        mlflow.log_dict(dict(run.config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        mlflow.log_metrics({mlflow_name(n): v for n, v in metrics.items()}, step=step, run_id=self.run.info.run_id)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = {"columns": list(COLUMNS), "data": [list(row) for row in rows]}
        mlflow.log_dict(table, f"samples/step_{step}.json", run_id=self.run.info.run_id)

    def close(self) -> None:
        mlflow.end_run()


def mlflow_name(metric: str) -> str:
    """Returns the name with what MLflow takes: letters, digits, and _ - . / and spaces."""
    return re.sub(r"[^\w\-. /]", "_", metric.replace("@", "_at_"))


open_tracker = MLflow
