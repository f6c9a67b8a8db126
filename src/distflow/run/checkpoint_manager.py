"""Checkpoints of a run: when they are due, their contents, and how a run resumes from one."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distflow.checkpoint.shared_folder import check_shared
from distflow.checkpoint.store import (
    RUN_STATE,
    TENSORS,
    format_problem,
    list_checkpoints,
    load_full_tensors,
    load_tensors,
    names_of_checkpoints,
    prune,
    read_state,
    read_values,
    verify,
)
from distflow.checkpoint.writer import CheckpointWriter, Parts, write_s
from distflow.cluster.identity import thread_counts
from distflow.cluster.world import World
from distflow.comm.collectives import broadcast_bytes
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.fingerprint import changes, fingerprint
from distflow.dataset.view import DatasetView
from distflow.errors import CheckpointError, ConfigError, cut
from distflow.plan.tasks import Resample
from distflow.roles.role import Role
from distflow.run.program import Program
from distflow.run.rollouts import ROLLOUTS, Rollouts
from distflow.run_folder import AUTO, BEST, CHECKPOINTS, HUGGINGFACE, NEWEST, checkpoint_dir
from distflow.util.patient_files import WholeFiles
from distflow.weights.state import RoleState

logger = logging.getLogger(__name__)


class CheckpointManager:
    """One worker's checkpoints: the state of roles that are trained or have a `state()`. All else follows from the seed
    and the step."""

    def __init__(
        self,
        program: Program,
        world: World,
        roles: Mapping[str, Role],
        data: Coordinator,
        rollouts: Rollouts,
        rows: DatasetView,
    ) -> None:
        self.program, self.config, self.world = program, program.config, world
        self.roles, self.data, self.rollouts, self.rows = roles, data, rollouts, rows
        self._fingerprint: dict[str, Any] = {}  # of the rows, on rank 0
        self.folder = self.config.run_folder / CHECKPOINTS
        plan, self.rank = data.plan, data.rank
        self.ranks: dict[str, tuple[int, ...]] = {}  # that hold the state of a role
        for role in sorted({n.role for n in plan.flow.nodes if n.method}):
            nodes = [n for n in plan.flow.nodes if n.role == role and n.method]
            trained = [n for n in nodes if n.type == "train"]
            self.ranks[role] = plan.partition_of((trained or nodes)[0].id).layout.ranks
        if rollouts.writers:
            self.ranks[ROLLOUTS] = rollouts.writers
        self.files = WholeFiles()
        self.resumed_run: Path | None = None  # folder of the run whose checkpoint was restored
        self._copies: dict[int, Parts] = {}  # step → what this worker writes, until all have come there
        self.writer = CheckpointWriter(self.folder, self.rank, world.all_ranks, self.ranks, world.background.run)

    def due(self, step: int) -> bool:
        return self.config.checkpoint.every > 0 and step % self.config.checkpoint.every == 0

    def copy(self, step: int) -> None:
        """Copies the state of its roles: this worker may train further before all workers are at `step`."""
        self._copies[step] = parts = self.writer.copy(self._role_states())
        self.world.heartbeat.write_s = max(self.world.heartbeat.write_s, write_s(parts))

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Starts to write a checkpoint, with those `metrics` of its step by which the best one is chosen.

        If the one before could not be written, warns; the next one may succeed.
        """
        try:
            self._await_writer()
        except CheckpointError as e:
            if self.rank == 0:
                logger.warning("%s; the run continues", e)
        if step not in self._copies:
            self.copy(step)
        parts = {**self._copies.pop(step), **self._rollouts_after(step)}
        export = self._export if self.config.checkpoint.export and "actor" in self.ranks else None
        self.writer.save(step, parts, {**self._run_state(step), "metrics": dict(metrics)}, self._on_complete, export)

    def _rollouts_after(self, step: int) -> Parts:
        tensors = self.rollouts.tensors(step)
        return self.writer.own_files(ROLLOUTS, tensors, self.rollouts.values) if tensors else {}

    def finish(self, step: int | None, metrics: Mapping[str, float] | None = None) -> None:
        """Waits until the last checkpoint is on disk, or raises; writes one of `step` first if it was not due."""
        if step is not None and not self.due(step):
            self.save(step, metrics or {})
        self._await_writer()

    def _await_writer(self) -> None:
        """Waits for the checkpoint that is being written. A large one takes longer than workers wait for each other."""
        heartbeat = self.world.heartbeat
        with heartbeat.waiting(self.world.all_ranks, heartbeat.write_s):
            self.writer.wait()

    def close(self) -> None:
        self.writer.close()

    def resume(self, source: str | None) -> int:
        """Restores a checkpoint, given as for `--resume`, and returns its step; 0 without a source."""
        world = self.world
        if self.rank == 0:
            self._fingerprint = fingerprint(self.rows)
        check_shared(self.config.run_folder, self.rank, world.all_ranks, world.transport.run)
        if source is None:
            return 0
        folder, paths = self._candidates(source)
        problems = [format_problem(path) for path in paths]
        if not world.any_rank(not all(problems)):  # all are of another version, or there is none
            if source == AUTO:
                return 0
            if problems:
                raise ConfigError(f"--resume: {problems[0]}")
        for path, problem in zip(paths, problems, strict=True):
            problem = problem or verify(path, self.rank, len(world.all_ranks), "state")
            if not world.any_rank(problem is not None):
                step = self._restore(path)
                self.resumed_run = path.parent.parent
                if damage := verify(path, self.rank, len(world.all_ranks), "export"):
                    logger.warning("%s; the run does not need it, `distflow export` writes another", damage)
                if self.rank == 0:
                    logger.info("resumed from %s", path)
                return step
            if problem:
                logger.warning("%s; looking for an older checkpoint", problem)
        kind = "complete checkpoint" if paths else "checkpoint"
        raise ConfigError(
            f"--resume: there is no {kind} in {folder}; start without --resume, or name another checkpoint"
        )

    def _candidates(self, source: str) -> tuple[Path, list[Path]]:
        """Returns the folder that is searched and its checkpoints, newest first, as rank 0 sees them."""
        folder, names = self.folder, ""
        try:
            if source not in (AUTO, NEWEST):
                folder = Path(source).expanduser()
            if self.rank == 0:
                names = "\n".join(names_of_checkpoints(folder))
        except (OSError, RuntimeError) as e:
            raise ConfigError(f"--resume: '{cut(source)}' cannot be looked up: {e}") from None
        listing = broadcast_bytes(self.rank, self.world.all_ranks, names.encode())
        names = self.world.transport.run(listing).decode()
        return folder, [folder / name for name in names.splitlines()]

    def _role_states(self) -> dict[str, RoleState]:
        states = {name: role.state() for name, role in self._kept_here()}
        return {name: RoleState.of(state, name) for name, state in states.items() if state is not None}

    def _kept_here(self) -> list[tuple[str, Role]]:
        """Returns the roles whose state this worker holds; the roles of an evaluation alone have none."""
        return [(name, role) for name, role in self.roles.items() if self.rank in self.ranks.get(name, ())]

    def _run_state(self, step: int) -> dict[str, Any]:
        loader = self.data.loader
        data = {"eras": loader.eras, **self._fingerprint} if self.rank == 0 else {}  # which writes it
        if self.rank == 0 and loader.curriculum:
            drawn = self.data.position_after(step) // loader.prompts if self.data.plan.flow.sampling_node else step
            data["curriculum"] = loader.curriculum.state(drawn)
        threads = thread_counts(self.world.identities)
        return {"position": self.data.position_after(step), "data": data, "threads": threads, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        """Returns what must be the same for a run to be the same."""
        seed, data = self.config.seed, self.config.data
        identity = {"flow": self.program.flow.name, "seed": seed, "batch": data.batch, "repeat": self.program.repeat}
        return identity | {"shuffle": data.shuffle}

    def _restore(self, path: Path) -> int:
        """Restores roles and data, and returns the step that it was written after."""
        identity = self._identity()
        state = {"shuffle": True} | read_state(path, *(identity.keys() - {"shuffle"}))  # older ones always were
        for key, value in identity.items():
            if (saved := state[key]) != value:
                raise ConfigError(
                    f"--resume: {path} is of a run with {key} {saved!r}, the config has {value!r}; set it back or"
                    " start anew from an export"
                )
        for name, role in self._kept_here():
            folder, own = path / name, role.state()
            if own is not None and not folder.is_dir():
                raise ConfigError(
                    f"--resume: {path} has no state of the role '{name}', so it would silently be re-initialised;"
                    " use the flow that it was written with, or start from an export (model: DIRECTORY)"
                )
            if folder.is_dir():
                values = read_values(folder)
                if isinstance(own, RoleState):
                    role.restore(values)
                    load_tensors(folder, role.state(), self.rank)
                else:
                    role.restore(values | load_full_tensors(folder) if isinstance(values, dict) else values)
        if (path / ROLLOUTS).is_dir():
            tensors, values = path / ROLLOUTS / TENSORS, read_values(path / ROLLOUTS)
            self.rollouts.open(tensors, values)
            if self.rank == 0 and (dropped := self.rollouts.unused(tensors, values)):
                logger.warning("--resume: %s: %s", path, dropped)
        self.data.position = state["position"]
        self._resume_data(path, state)
        self._compare_threads(path, state.get("threads"))
        return int(state["step"])

    def _resume_data(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continues the stream of prompts; refuses if its rows are not those it was drawn from."""
        recorded, loader, plan = state.get("data"), self.data.loader, self.data.plan
        if not recorded:
            if self.rank == 0:
                logger.warning("%s does not say which data it was trained on; that it is the same is not checked", path)
            return
        problem = None
        try:
            if self.rank == 0:
                problem = changes(self.rows, recorded) or self._tokenizer_change(int(recorded["rows"]))
            position = max(state["position"], loader.position(state["step"]))  # dynamic sampling is ahead
            rounds = max([t.rounds for t in plan.tasks if isinstance(t, Resample)], default=1)
            drawn = position + plan.prompts_ahead + plan.staleness * loader.prompts * rounds
            loader.resume(recorded["eras"], drawn)
            if loader.curriculum and "curriculum" in recorded:
                loader.curriculum.restore(recorded["curriculum"])
            elif loader.curriculum or "curriculum" in recorded:
                what = ("files", "sources") if loader.curriculum else ("sources", "files")
                problem = problem or "the checkpoint is of a run with data.{} and the config has data.{}".format(*what)
        except (LookupError, TypeError, ValueError, ArithmeticError) as e:
            raise CheckpointError(
                f"{path / RUN_STATE} is not the state of a run ({e!r}); use another checkpoint"
            ) from e
        if self.world.any_rank(problem is not None):
            raise ConfigError(
                f"--resume: {problem or 'the data has changed, as rank 0 says'}; some rows would be trained twice and"
                " others never: put the rows back in their places (new ones may follow the last), or start anew from"
                f" an export of {path} (`distflow export`, model: DIRECTORY) in another run_dir"
            )
        if self.rank == 0 and loader.eras[-1][1] != loader.eras[0][1] and loader.eras[-1][0] >= position:
            start, rows = loader.eras[-1]
            logger.info("the data has %d rows now; the new ones join with the next epoch, at prompt %d", rows, start)

    def _compare_threads(self, path: Path, written: Any) -> None:
        threads = thread_counts(self.world.identities)
        if self.rank == 0 and self.world.device.type == "cpu" and written not in (None, threads):
            logger.warning(
                "%s was written by workers with %s threads each, these have %s: results may differ in their last bits;"
                " start with that OMP_NUM_THREADS to continue to the bit",
                path,
                " or ".join(map(str, written)) if isinstance(written, list) else written,
                " or ".join(map(str, threads)),
            )

    def _tokenizer_change(self, rows: int) -> str | None:
        """Returns why rows may not even be appended: a tokenizer is made of the first ones."""
        from distflow.model.prompt_check import TOKENIZER_ROWS
        from distflow.model.tokenizer import SMALLEST

        model = self.config.model
        if model is None or model.arch is None or model.vocab <= SMALLEST or len(self.rows) == rows:
            return None
        return (
            None
            if rows >= TOKENIZER_ROWS
            else f"rows were appended, and the tokenizer of `model.arch` is made of the first {TOKENIZER_ROWS:,} rows"
        )

    def _export(self, path: Path) -> None:
        """Exports the actor into a checkpoint; called on rank 0 before it is complete."""
        from distflow.checkpoint.export import export_role

        export_role(path / "actor", path / HUGGINGFACE)

    def _on_complete(self, path: Path) -> None:
        """Prunes and marks the best; called on rank 0 when a checkpoint is complete."""
        config = self.config.checkpoint
        best = self._best(config.best) if config.best else None
        prune(self.folder, config.keep, () if best is None else (best,))
        if best is not None:
            self.files.write(self.folder / BEST, json.dumps({"step": best}))

    def _best(self, metric: str) -> int | None:
        """Returns the checkpoint after whose step the metric was highest; None if none of them has a value."""
        values: dict[int, float] = {}
        for step in list_checkpoints(self.folder):
            with suppress(CheckpointError):  # a damaged one is not the best
                value = read_state(checkpoint_dir(self.folder, step)).get("metrics", {}).get(metric)
                if isinstance(value, int | float):
                    values[step] = value
        return max(values, key=lambda s: (values[s], s), default=None)
