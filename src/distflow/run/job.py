"""A run on one worker: opens data and models with the others, runs the steps, saves, closes."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from distflow.checkpoint.store import read_state, verify
from distflow.cluster.identity import list_hosts
from distflow.cluster.rendezvous import Rendezvous
from distflow.cluster.world import World
from distflow.comm.collectives import Communication
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.dataset.view import DatasetView
from distflow.errors import ConfigError, DistflowError, StoppedError
from distflow.liveness.heartbeat import Heartbeat
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.observe.progress import Progress
from distflow.observe.recorder import Recorder
from distflow.observe.samples import text_of_tokens
from distflow.observe.trackers import start_trackers
from distflow.observe.trackers.tracker import RunInfo
from distflow.plan import Layout, Plan, RunNode, SyncWeights
from distflow.roles.context import RoleContext
from distflow.roles.role import Role
from distflow.run.async_comm import AsyncComm, CommThread
from distflow.run.checkpoint_manager import CheckpointManager
from distflow.run.comm import Comm
from distflow.run.description import describe_run
from distflow.run.evaluation import Evaluation
from distflow.run.program import Program
from distflow.run.redaction import redact
from distflow.run.rollouts import Rollouts
from distflow.run.versions import Versions
from distflow.run.worker import Surroundings, Worker
from distflow.train.update_spec import check_losses
from distflow.util.patient_files import WholeFiles, WriteErrors


@dataclass(frozen=True)
class Inputs:
    """The rows and plans of a run."""

    plan: Plan
    rows: DatasetView
    held_out: DatasetView | None
    eval_plan: Plan | None  # if there are held-out rows
    trains: bool
    skipped: Sequence[str]  # a line for the first of the bad rows
    skipped_count: int

    @classmethod
    def open(cls, program: Program, plan: Plan) -> "Inputs":
        """Opens the data, and raises what is wrong with the config before any worker waits for this one."""
        config, rows, held_out = program.config, program.dataset(plan), program.eval_dataset()
        eval_plan = program.eval_plan(plan.workers, len(held_out)) if held_out else None
        if config.steps == 0 and not eval_plan:
            raise ConfigError("steps: 0 only evaluates, and there is no `eval` section; add one, or give steps")
        check_losses(plan.flow, config.base)
        dataset = rows.dataset
        return cls(plan, rows, held_out, eval_plan, config.steps != 0, dataset.skipped, dataset.skipped_count)

    @property
    def plans(self) -> list[Plan]:
        return [p for p in (self.plan if self.trains else None, self.eval_plan) if p]


class Job:
    """A run as one worker sees it. `resume` is what `--resume` names; `stop_requested` is checked after every step, and
    `check_owner`, which raises if the folder is no longer this run's, before anything of a step is written there.

    It is prepared in phases. From the second on workers communicate, so all of them go through these in one order.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        rendezvous: Rendezvous,
        heartbeat: Heartbeat,
        resume: str | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self.check_owner = check_owner
        self.program, self.config, self.plan, self.rank = program, program.config, plan, rendezvous.rank
        self.heartbeat, self.stop_requested = heartbeat, stop_requested
        self.files = WholeFiles()
        # 1. Alone.
        self.inputs = Inputs.open(program, plan)
        self.plans = self.inputs.plans
        # 2. Meet the other workers.
        self.world = World(self.config, self.plans, self._model_layouts(), heartbeat, rendezvous)
        if self.rank == 0:
            describe_run(self.config, self.plans[0], list_hosts(self.world.identities), self.files)
        # 3. Open the model, and drop prompts that it cannot read.
        self.source, self.inputs = self._open_model()
        # 4. Load the models of roles.
        rows, data = self.inputs.rows, self.config.data
        self.steps = max(1, len(rows) // data.batch) if self.config.steps is None else self.config.steps
        self.generates = {n.role: p.partition_of(n.id).layout for p in self.plans for n in p.flow.nodes if n.generates}
        self.roles: dict[str, Role] = {}
        self._make_roles()
        # 5. Restore the state of a checkpoint.
        self.data = self._coordinator(plan, Loader(rows, data.batch, program.repeat, self.config.seed))
        self.rollouts = Rollouts(plan)
        self.checkpoints = CheckpointManager(program, self.world, self.roles, self.data, self.rollouts, rows)
        self.first = self.checkpoints.resume(resume) if self.steps else 0  # the step after which this run starts
        # 6. Open the logs, and make the workers of the plans.
        self.progress = self._open_progress() if self.rank == 0 else None
        self.metrics = MetricsReducer(self.rank, self.world.all_ranks, self.progress)
        self.recorder = self._open_recorder()
        around = Surroundings(self.config.seed, self.config.run_folder, heartbeat.start_task, self.recorder)
        versions = Versions(plan.staleness, self.first, self.steps)
        self.comm = Comm(self.rank, plan, self.roles, versions)
        self.worker = Worker(self.data, self.comm, around, rollouts=self.rollouts) if self.steps else None
        self.evaluation = self._evaluation(around)

    def run(self) -> None:
        self._check_fields()
        self.heartbeat.start_task(-1, "wait for all workers")  # some take longer than others to load models
        self._start_recording()
        if self.evaluation and not self.first:
            self._evaluate_first()
        if self.worker:
            self._train(self.worker)
        self.heartbeat.start_task(self.steps, "finish")
        if self.steps > self.first:
            self.checkpoints.finish(self.steps)
        self.metrics.wait()
        if self.rank == 0:
            self.check_owner()
        self.world.leave_together()

    def _evaluate_first(self) -> None:
        """Evaluates before the first step, or all there is to evaluate. Nobody votes yet: a run stops after a step."""
        step = read_state(self.program.checkpoint)["step"] if self.program.checkpoint else 0
        self.world.transport.run(self._end_metrics(step, StepMetrics(), lambda: False))
        self.recorder.end_step(step)

    def _train(self, worker: Worker) -> None:
        if self.world.overlap:  # the communication of steps has a thread of its own
            transport = self.world.overlap
            thread = CommThread(transport.run, transport.sent, self.heartbeat.waiting, self.stop_requested)
            self.comm = comm = AsyncComm(worker, self.evaluation, self.metrics, thread)
            comm.start()
        try:
            self.world.transport.run(worker.steps(self._end_of_step, self._after_step, self._after_chain))
        except DistflowError as e:
            self.recorder.fail(self.heartbeat.step, str(e))
            raise

    def close(self) -> None:
        self.metrics.close()
        self.recorder.close()
        self.checkpoints.close()
        self.data.close()
        for role in self.roles.values():
            role.close()
        if self.progress:
            self.progress.close()
        self.world.close()

    def _open_model(self) -> tuple[Any, Inputs]:
        """Opens the model of the config or checkpoint, if there is one; returns it and the rows that it can read."""
        config, inputs, all_ranks = self.config, self.inputs, self.world.all_ranks
        if not config.model:
            return None, inputs
        from distflow.checkpoint.model import find_role, open_checkpoint
        from distflow.model.prompt_check import check_prompts, texts
        from distflow.model.source import open_model
        from distflow.model.text import Text, prompt_limit

        self.heartbeat.start_task(-1, "check the prompts")
        if checkpoint := self.program.checkpoint:
            self._verify(checkpoint)
            source = open_checkpoint(find_role(checkpoint, "actor"))
        else:
            source = open_model(config.model, lambda: texts(inputs.rows), config.base, config.seed)
        text = Text(
            source, prompt_limit(source, config.rollout.max_tokens, config.data.max_prompt), config.data.rendered
        )
        with self.heartbeat.waiting(all_ranks):
            skip = config.data.on_bad_row == "skip"
            checked = check_prompts(inputs.rows, text, skip, self.rank, len(all_ranks), self.world.all_reduce)
            if inputs.held_out:
                check_prompts(inputs.held_out, text, False, self.rank, len(all_ranks))
        skipped = [*inputs.skipped, *checked.skipped]
        count = inputs.skipped_count + checked.count
        return source, replace(inputs, rows=checked.rows, skipped=skipped, skipped_count=count)

    def _verify(self, checkpoint: Path) -> None:
        """Verifies a checkpoint, of which every worker reads a share."""
        problem = verify(checkpoint, self.rank, len(self.world.all_ranks), "state")
        if self.world.any_rank(problem is not None):
            problem = problem or f"{checkpoint} is damaged, as another worker has found"
            raise ConfigError(f"{problem}; name another checkpoint")

    def _make_roles(self) -> None:
        """Makes the roles of this worker, in an order that all ranks share: they may create process groups for them."""
        self.heartbeat.start_task(-1, "load models")
        self.hybrid_mesh = cache(self.world.mesh)
        # Roles with engines come first.
        for name in sorted(_roles(self.plans, self.rank), key=lambda role: (role not in self.generates, role)):
            self.roles[name] = self._make_role(name)

    def _make_role(self, name: str) -> Role:
        """Makes the object that implements a role on this worker."""
        config, world = self.config, self.world
        implementation, args = self.program.role_class(name), dict(self.program.role_bindings[name].args)
        if _takes_role_context(implementation):
            args["role"] = RoleContext(
                name=name,
                rank=self.rank,
                layouts=_layouts(self.plans, name),
                meshes=world.meshes,
                hybrid_mesh=self.hybrid_mesh,
                topology=world.topology,
                device=world.device,
                source=self.source,
                rollout=config.rollout,
                train=config.train,
                critic=config.critic,
                max_prompt=config.data.max_prompt,
                rendered=config.data.rendered,
                steps=self.steps,
                seed=config.seed,
                base=config.base,
                generates=self.generates,
                roles=self.roles,
            )
        return implementation(**args)

    def _check_fields(self) -> None:
        """Lets roles such as rewards refuse their fields and rows before anything is generated."""
        for plan in self.plans:
            for node in plan.flow.nodes:
                if node.method and node.role in self.roles:
                    fields = [node.local_name(f) for f in node.reads]
                    self.roles[node.role].check_fields(fields, "eval: " if plan is self.inputs.eval_plan else "")
        for role in self.roles.values():
            for rows in (self.inputs.rows, self.inputs.held_out):
                if rows is not None:
                    role.check_rows(rows, self.rank, self.plan.workers)

    def _model_layouts(self) -> list[Layout]:
        """Returns the layouts of the roles that ask for a RoleContext."""
        roles = {n.role for p in self.plans for n in p.flow.nodes if n.method}
        wanted = [r for r in sorted(roles) if _takes_role_context(self.program.implementation(r))]
        return list(dict.fromkeys(layout for r in wanted for layout in _layouts(self.plans, r).values()))

    def _coordinator(self, plan: Plan, loader: Loader) -> Coordinator:
        return Coordinator(self.rank, plan, loader, self.world.topology)

    def _open_progress(self) -> Progress:
        config, inputs = self.config, self.inputs
        folder, settings = config.run_folder, redact(config.model_dump(mode="json"))
        trackers = start_trackers(config.track, RunInfo(folder.name, folder, settings, self.first))
        hosts = [i.host for i in self.world.identities]
        return Progress(
            folder, self.steps, inputs.skipped, inputs.skipped_count, self.first, hosts, trackers, self.files
        )

    def _open_recorder(self) -> Recorder:
        config, record = self.config, self.config.record
        pieces = text_of_tokens(self.source.tokenizer) if self.source else None
        sent = self.world.transport.sent
        recorder = Recorder.make(config.run_folder, self.rank, sent, record.spans, record.samples, pieces)
        if self.progress and recorder.samples:
            recorder.samples.listener = self.progress.on_samples
        return recorder

    def _start_recording(self) -> None:
        """Waits for all workers, and agrees with them on what time it is."""
        now = self.world.all_reduce(torch.tensor([time.time()], dtype=torch.float64), torch.maximum)
        self.recorder.open(float(now), self.first, len(self.world.all_ranks))
        self.heartbeat.on_wait = self.recorder.waited

    def _evaluation(self, around: Surroundings) -> Evaluation | None:
        plan, rows = self.inputs.eval_plan, self.inputs.held_out
        if not (plan and rows and self.config.eval):
            return None
        loader = Loader(rows, plan.samples // plan.repeat, plan.repeat, 0, rewind=True)
        worker = Worker(self._coordinator(plan, loader), self.comm, around, held_out=True)
        return Evaluation(worker, self.config.eval.every, self.steps)

    def _after_step(self, step: int, metrics: StepMetrics) -> Communication[None]:
        yield from self._end_metrics(step, metrics, self.stop_requested)
        versions = self.comm.versions
        if versions.stop_step == step + versions.delay:
            # What all workers have done by now. Those ahead still make the rollouts that belong to its state.
            self._copy_state(versions.stop_step)

    def _end_metrics(self, step: int, metrics: StepMetrics, vote: Callable[[], bool]) -> Communication[None]:
        """Evaluates if it is time to, and reduces the metrics; the vote whether to stop goes with them."""
        if self.rank == 0:
            self.check_owner()
        if self.evaluation:
            yield from self.evaluation(step, metrics)
        if self.world.device.type != "cpu":
            metrics.log("perf/device_peak_mib", torch.accelerator.max_memory_allocated() / (1 << 20), reduce="max")
        if failed := WriteErrors.take_count():
            metrics.log("record/failed_writes", failed, reduce="sum")
        with self.recorder.span(step, "control", "metrics"):
            yield from self.comm.reduce(self.metrics, step, metrics, vote())

    def _after_chain(self, step: int, metrics: StepMetrics) -> None:
        self.comm.after_chain(step, metrics)
        if self.checkpoints.due(step):
            self._copy_state(step)

    def _copy_state(self, step: int) -> None:
        """Copies this worker's state for a checkpoint, if it goes on before all workers have done `step`."""
        if self.plan.staleness and step <= self.steps:
            self.checkpoints.copy(step)

    def _end_of_step(self, step: int, metrics: StepMetrics) -> None:
        stop = step == self.comm.versions.stop_step
        if stop or self.checkpoints.due(step):
            self.check_owner()
            with self.recorder.span(step, "checkpoint", "save"):
                self.checkpoints.save(step)
        self.recorder.end_step(step, local=int(metrics.totals.get(("data/bytes_local", "mean"), (0, 0))[0]))
        if stop and step < self.steps:
            self.checkpoints.finish(None)
            self.metrics.wait()
            raise StoppedError(
                f"stopped on request after step {step} of {self.steps}, which is saved; continue with --resume"
            )


def _roles(plans: list[Plan], rank: int) -> list[str]:
    """Returns the roles of whose objects this rank's chains call a method, or move the weights."""
    roles: dict[str, None] = {}
    for plan in plans:
        for t in plan.chain(rank):
            if isinstance(t, SyncWeights):
                roles[t.role] = None
            elif isinstance(t, RunNode) and plan.flow.node(t.node).method:
                roles[plan.flow.node(t.node).role] = None
    return list(roles)


def _layouts(plans: list[Plan], role: str) -> dict[str, Layout]:
    """Returns method → layout of the role's node of that name."""
    return {
        n.call.rpartition(".")[2]: p.partition_of(n.id).layout
        for p in plans
        for n in p.flow.nodes
        if n.role == role and n.method
    }


def _takes_role_context(implementation: Any) -> bool:
    return "role" in inspect.signature(implementation).parameters
