"""The rollouts that are ahead of training: part of the state of a run, as the weights that made them are gone.

A worker that generates keeps what its nodes wrote for as many steps as it may be ahead. A checkpoint has a file of each
such worker. A resumed run goes through these steps again and takes the rollouts from there instead of generating them,
by sample id, so that it may have another number of workers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distflow.batch.batch import NO_SAMPLES, Batch, Column, Ragged, as_column, concat, select
from distflow.checkpoint.tensor_index import file_name
from distflow.comm.routes import contiguous_replicas
from distflow.errors import CheckpointError, cut
from distflow.flow.graph import Node
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout, contiguous_share, format_ranks
from distflow.plan.tasks import Plan
from distflow.util.arrays import Ints

ROLLOUTS = "rollouts-ahead"  # a folder of a checkpoint, beside those of roles, which cannot have such a name
_CARRIED_NODE = "carried on"  # beside the ids of nodes, which cannot have such a name
CARRIED = f"{_CARRIED_NODE}/"


@dataclass(frozen=True)
class Rollout:
    """The outputs of a node that generates, for some samples, and its metrics."""

    ids: Ints  # ascending
    columns: Mapping[str, Column]
    metrics: StepMetrics

    def joined(self, other: "Rollout") -> "Rollout":
        """Returns both, of other samples each."""
        ids = np.concatenate([self.ids, other.ids])
        order, metrics = np.argsort(ids), StepMetrics()
        for part in (self, other):
            metrics.merge(part.metrics.totals)
        fields = self.columns if len(self.ids) else other.columns
        columns = {f: concat([as_column(r.columns[f], len(r.ids), f) for r in (self, other)]) for f in fields}
        return Rollout(ids[order], {f: select(c, order) for f, c in columns.items()}, metrics)


class PartialRollouts:
    """The samples that a node may begin early, has begun before, and carries on to the next step."""

    def __init__(self, ahead: Batch, begun: Batch | None) -> None:
        self.ahead, self.begun = ahead, begun
        self.carried: Batch | None = None

    def carry(self, begun: Batch) -> None:
        self.carried = begun


class Rollouts:
    """The rollouts of one worker, by step and node."""

    def __init__(self, plan: Plan) -> None:
        self.delay = plan.staleness
        layouts = [plan.partition_of(n.id).layout for n in plan.flow.nodes if n.generates and self.delay]
        self.writers = tuple(sorted({replica[0] for layout in layouts for replica in layout.replicas}))
        self._kept: dict[tuple[int, str], Rollout] = {}
        self._carried: tuple[int, Batch | None] = -1, None  # the step that was generated last, what is carried on
        self._prompts, self._repeat = plan.samples // plan.repeat, plan.repeat
        self._nodes = {n.id for n in plan.flow.nodes if n.generates}
        if plan.prompts_ahead:
            self._nodes.add(_CARRIED_NODE)
        self._folder: Path | None = None
        self._places = 0  # files in the folder
        self._rounds = plan.flow.sampling_node is not None  # then a step asks for its samples in several parts
        self._logged: set[str] = set()  # what of the checkpoint has told its metrics

    def keep(self, step: int, node: Node, rollout: Rollout) -> None:
        """Keeps a rollout, and forgets rollouts that all workers have trained on.

        In dynamic sampling, each round of the step adds its samples.
        """
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] > step - self.delay}
        before = self._kept.get((step, node.id))
        self._kept[step, node.id] = before.joined(rollout) if before else rollout

    def carry(self, step: int, begun: Batch | None) -> None:
        """Keeps the samples that are carried on to the step after `step`."""
        self._carried = step, begun

    def begun(self, step: int, layout: Layout, rank: int) -> Batch | None:
        """Returns the samples begun before `step`, in this run or, in its first step, in the one it resumes."""
        before, begun = self._carried
        if before == step - 1:
            return begun
        if self._folder is None:
            return None
        try:
            return self._read_carried(self._folder, f"{step - 1}/{CARRIED}", layout, layout.replica_of(rank) or 0)
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as e:
            raise CheckpointError(f"{self._folder}: cannot be read ({e}); use another checkpoint") from e

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Returns the rollouts of the steps after `step`, as a checkpoint keeps them."""
        tensors: dict[str, Tensor] = {}
        before, begun = self._carried
        if begun is not None and before > step:
            tensors |= _batch_tensors(f"{before}/{CARRIED}", begun)
        for (after, node), rollout in self._kept.items():
            if after > step:
                prefix = f"{after}/{node}/"
                tensors[f"{prefix}metrics"] = _encode([[*k, *v] for k, v in rollout.metrics.totals.items()])
                tensors |= _batch_tensors(prefix, rollout)
        return tensors

    @property
    def values(self) -> dict[str, int]:
        return {"staleness": self.delay, "places": len(self.writers)}

    def open(self, folder: Path, values: Mapping[str, int]) -> None:
        """Reads the rollouts of a checkpoint from now on, unless it was made with another staleness."""
        if values.get("staleness") == self.delay:
            self._folder, self._places = folder, int(values["places"])

    def unused(self, folder: Path, values: Mapping[str, int]) -> str:
        """Returns which rollouts of a checkpoint this run generates again, and why; "" if it uses all."""
        before, places = values.get("staleness"), range(int(values["places"]))
        dropped: dict[str, set[int]] = {}  # by node
        steps: set[int] = set()
        try:
            for place in places:
                with safe_open(folder / file_name(place), "pt") as file:
                    for name in file.keys():  # noqa: SIM118 (it is no dict)
                        step, node, kind = name.split("/", 2)
                        if kind == "ids" and (before != self.delay or node not in self._nodes):
                            dropped.setdefault(node, set()).update(file.get_tensor(name).tolist())
                            steps.add(int(step))
                if not dropped:  # the others have the same nodes
                    return ""
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as e:
            raise CheckpointError(f"{folder}: cannot be read ({e}); use another checkpoint") from e
        if before != self.delay:
            why = f"it was written with rollout.staleness {before}, the config has {self.delay}"
        elif dropped.keys() == {_CARRIED_NODE}:
            why = "it was written with rollout.partial, which the config has not"
        else:
            why = f"the flow has no node '{min(dropped)}' that generates"
        ids = cut(format_ranks(tuple(sorted(set().union(*dropped.values())))), 300)
        return (
            f"{why}; rollouts of steps {format_ranks(tuple(sorted(steps)))} are dropped, and samples {ids} are"
            " generated again; set it back to use them"
        )

    def recall(self, step: int, node: Node, layout: Layout, rank: int, ids: Ints) -> Rollout | None:
        """Returns a rollout that the checkpoint has of these samples, None if there is none.

        In dynamic sampling it may have fewer: another layout draws them in other rounds.
        """
        if self._folder is None:
            return None
        try:
            return self._read(
                self._folder, f"{step}/{node.id}/", layout, layout.replica_of(rank) or 0, ids, node.writes
            )
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as e:
            raise CheckpointError(f"{self._folder}: cannot be read ({e}); use another checkpoint") from e

    def _read_carried(self, folder: Path, prefix: str, layout: Layout, replica: int) -> Batch | None:
        """Reads carried samples from the files of replicas whose prompts may be this replica's now."""
        first, last = contiguous_share(self._prompts, layout.dp, replica)
        parts = []
        for place in np.unique(contiguous_replicas(self._prompts, self._places)[first:last]).tolist():
            with safe_open(folder / file_name(place), "pt") as file:
                names = [n for n in file.keys() if n.startswith(prefix)]  # noqa: SIM118 (it is no dict)
                if names:
                    tensors = {n.removeprefix(prefix): file.get_tensor(n) for n in names}
                    parts.append((tensors.pop("ids").numpy(), _to_columns(tensors)))
        parts = [(ids, columns) for ids, columns in parts if len(ids)]
        if not parts:
            return None
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        fields = parts[0][1]
        joined = {f: select(concat([columns[f] for _, columns in parts]), order) for f in fields}
        return Batch(ids[order], ids[order] // self._repeat, joined)

    def _read(
        self, folder: Path, prefix: str, layout: Layout, replica: int, ids: Ints, writes: Iterable[str]
    ) -> Rollout | None:
        own = [p for p in range(self._places) if p * layout.dp // self._places == replica]
        found: list[tuple[Ints, dict[str, Column]]] = []
        metrics, missing = StepMetrics(), set(ids.tolist())
        near = replica * self._places // layout.dp  # in the layout of before, its samples are there or nearby
        for place in sorted(range(self._places), key=lambda p: (p not in own, abs(p - near))):
            if not missing and place not in own:
                break
            with safe_open(folder / file_name(place), "pt") as file:
                names = [n for n in file.keys() if n.startswith(prefix)]  # noqa: SIM118 (it is no dict)
                if not names:
                    return None
                if place in own and f"{prefix}{place}" not in self._logged:
                    self._logged.add(f"{prefix}{place}")
                    metrics.merge({(n, r): (v, c) for n, r, v, c in _decode(file.get_tensor(f"{prefix}metrics"))})
                stored = file.get_tensor(f"{prefix}ids").numpy()
                index = np.flatnonzero(np.isin(stored, sorted(missing)))
                if len(index):
                    missing -= set(stored[index].tolist())
                    tensors = {n.removeprefix(prefix): file.get_tensor(n) for n in names}
                    found.append((stored[index], {f: select(c, index) for f, c in _to_columns(tensors).items()}))
        if missing and not self._rounds:
            raise ValueError(f"sample {min(missing)} is missing")
        ids = ids[~np.isin(ids, sorted(missing))]
        if not found:  # no samples: of which kind their columns are is not known here
            return Rollout(ids, dict.fromkeys(writes, NO_SAMPLES), metrics)
        every = np.concatenate([stored for stored, _ in found])
        order = np.argsort(every)[np.searchsorted(np.sort(every), ids)]
        fields = found[0][1]
        return Rollout(ids, {f: select(concat([columns[f] for _, columns in found]), order) for f in fields}, metrics)


def _batch_tensors(prefix: str, batch: Batch | Rollout) -> dict[str, Tensor]:
    tensors = {f"{prefix}ids": torch.from_numpy(batch.ids).clone()}
    for field, column in batch.columns.items():
        tensors |= {f"{prefix}{name}": t for name, t in _to_tensors(field, column).items()}
    return tensors


def _to_tensors(field: str, column: Column) -> dict[str, Tensor]:
    if isinstance(column, Ragged):
        lengths = torch.from_numpy(column.lengths.copy())
        return {f"{field}:values": column.joined().clone(), f"{field}:lengths": lengths}
    if isinstance(column, Tensor):
        return {f"{field}:tensor": column.detach().cpu().clone()}
    return {f"{field}:json": _encode(column)}


def _to_columns(tensors: Mapping[str, Tensor]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name, tensor in tensors.items():
        field, _, kind = name.rpartition(":")
        if kind == "values":
            lengths = tensors[f"{field}:lengths"].numpy()
            columns[field] = Ragged.packed(tensor, lengths, tuple(tensor.shape[1:]))
        elif kind == "tensor":
            columns[field] = tensor
        elif kind == "json":
            columns[field] = _decode(tensor)
    return columns


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(bytes(data.numpy()))
