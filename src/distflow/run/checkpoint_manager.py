"""When a run keeps what it did, and how it takes it up again."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distflow.data.coordinator import Coordinator
from distflow.engine.role_state import RoleState
from distflow.errors import CheckpointError, ConfigError, cut
from distflow.launch import IF_ANY, NEWEST
from distflow.plan import Plan
from distflow.run.checkpoint import (
    COMPLETE,
    Saver,
    Team,
    damage,
    load_tensors,
    place_of,
    prune,
    read_state,
    read_values,
    set_aside,
    steps_there,
    write_whole,
)
from distflow.run.network import Network
from distflow.run.program import Program

BEST = "best"


class CheckpointManager:
    """Of one worker. Roles that learn, or have a `state`, are kept; all else follows from the step and the seed."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        rank: int,
        network: Network,
        roles: Mapping[str, Any],
        data: Coordinator,
    ) -> None:
        self.program, self.config = program, program.config
        self.rank, self.network, self.roles, self.data = rank, network, roles, data
        self.folder = self.config.run_folder / "checkpoints"
        self.teams: dict[str, Team] = {}
        for role in sorted({n.role for n in plan.flow.nodes if n.method}):
            own = [n for n in plan.flow.nodes if n.role == role and n.method]
            learns = [n for n in own if n.type == "train"]
            ranks = plan.partition_of((learns or own)[0].id).layout.ranks
            self.teams[role] = Team(ranks, network.group(ranks) if learns else None)
        everybody = network.everybody
        self.saver = Saver(self.folder, rank, Team(everybody, network.group(everybody)), self.teams)
        self.failed = 0

    def due(self, step: int) -> bool:
        return self.config.checkpoint.every > 0 and step % self.config.checkpoint.every == 0

    def save(self, step: int) -> None:
        """Behind the next steps. One that cannot be written is told and does not end the run; the next one may be."""
        try:
            with self.network.heartbeat.waiting(self.network.everybody):
                self.saver.save(step, self._role_states(), self._state(), self._after)
        except CheckpointError as e:
            self._warn(f"{e}; the run goes on")
            self.saver.save(step, self._role_states(), self._state(), self._after)

    def finish(self, step: int | None) -> None:
        """Until what was last asked for is on disk, or else raise; `step` is one that may not have been asked for."""
        if step is not None and not self.due(step):
            self.save(step)
        with self.network.heartbeat.waiting(self.network.everybody):
            self.saver.wait()

    def close(self) -> None:
        self.saver.close()

    def resume(self, where: str | None) -> int:
        """The step to go on with; 0 if there is nothing to go on from."""
        if where is None:
            if self.rank == 0:
                set_aside(self.folder)
            return 0
        folder, places = self._candidates(where)
        for place in places:
            wrong = damage(place, self.rank, len(self.network.everybody))
            if not self.network.any_of_us(wrong is not None):
                step = self._restore(place)
                self._say(f"resumed from {place}")
                return step
            if wrong:
                print(f"distflow: {wrong}; looking for an older checkpoint", file=sys.stderr, flush=True)
        if where == IF_ANY and not places:
            return 0
        there = "none" if not places else "none that is whole"
        raise ConfigError(f"--resume: of {folder} there is {there}; start without --resume, or name another checkpoint")

    def _candidates(self, where: str) -> tuple[Path, list[Path]]:
        folder = self.folder
        if where not in (IF_ANY, NEWEST):
            try:
                path = Path(where).expanduser()
                if (path / COMPLETE).exists():
                    return path.parent, [path]
                folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            except (OSError, RuntimeError) as e:
                raise ConfigError(f"--resume: '{cut(where)}' cannot be looked up: {e}") from None
        return folder, [place_of(folder, step) for step in steps_there(folder)]

    def _role_states(self) -> dict[str, RoleState]:
        states = {}
        for name, role in self.roles.items():
            if hasattr(role, "role_state"):
                state = role.role_state()
            else:
                state = RoleState(role.state()) if hasattr(role, "state") else None
            if state is not None and self.rank in self.teams[name].ranks:
                states[name] = state
        return states

    def _state(self) -> dict[str, Any]:
        return {"position": self.data.position, **self._run()}

    def _run(self) -> dict[str, Any]:
        """What must be the same for a run to be the same."""
        c = self.config
        return {"flow": self.program.flow.name, "seed": c.seed, "batch": c.data.batch, "repeat": self.program.repeat}

    def _restore(self, place: Path) -> int:
        """The step after which it was kept."""
        state = read_state(place)
        for key, value in self._run().items():
            if state[key] != value:
                raise ConfigError(
                    f"--resume: {place} is of a run with {key} {state[key]!r}, the config has {value!r}; set it back or"
                    " start anew from an export"
                )
        for name, role in self.roles.items():
            folder, team = place / name, self.teams[name]
            if self.rank not in team.ranks:
                continue
            if hasattr(role, "role_state") and role.role_state() is not None:
                if not folder.is_dir():
                    raise ConfigError(f"--resume: {place} has nothing of the role '{name}', which the flow trains")
                role.load_role_state(read_values(folder), partial(load_tensors, folder, process_group=team.group))
            elif folder.is_dir() and hasattr(role, "state"):
                role.restore(read_values(folder))
        self.data.position = state["position"]
        return int(state["step"])

    def _after(self, place: Path) -> None:
        """Rank 0, when a checkpoint is complete."""
        keep = self.config.checkpoint
        if keep.export and (place / "actor").is_dir():
            from distflow.run.export import export_place

            export_place(place / "actor", place / "huggingface")
        best = self._best() if keep.best else None
        prune(self.folder, keep.keep, () if best is None else (best,))
        if best is not None:
            write_whole(self.folder / BEST, json.dumps({"step": best}))

    def _best(self) -> int | None:
        """Of the checkpoints that are there, the one after whose last step the metric was highest."""
        values: dict[int, float] = {}
        with open(self.config.run_folder / "metrics.jsonl", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line) if line.endswith("\n") else {}
                value = row.get(self.config.checkpoint.best)
                if isinstance(value, int | float):
                    values[int(row["step"]) + 1] = value
        there = [s for s in steps_there(self.folder) if s in values]
        return max(there, key=lambda s: (values[s], s), default=None)

    def _warn(self, text: str) -> None:
        self.failed += 1
        if self.rank == 0:
            print(f"distflow: {text}", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
