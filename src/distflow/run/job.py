"""What one worker does in a run: open data and models with the others, run the steps, save, close."""

import inspect
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from distflow.checkpoint.store import read_state
from distflow.cluster.identity import list_hosts
from distflow.cluster.network import Network
from distflow.cluster.rendezvous import Rendezvous
from distflow.comm.collectives import Communication
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
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
from distflow.run.checkpoint_manager import CheckpointManager
from distflow.run.description import describe_run
from distflow.run.evaluation import Evaluation
from distflow.run.link import Link
from distflow.run.overlap import Overlap
from distflow.run.program import Program
from distflow.run.redaction import redact
from distflow.run.rollouts import Rollouts
from distflow.run.weight_versions import WeightVersions
from distflow.run.worker import Worker
from distflow.train.update_spec import check_losses


class Job:
    """A run as one worker sees it. `resume` is what `--resume` names; `stop_requested` is checked after every step."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        rendezvous: Rendezvous,
        heartbeat: Heartbeat,
        resume: str | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        config, rank = program.config, rendezvous.rank
        self.program, self.config, self.plan, self.rank, self.heartbeat = program, config, plan, rank, heartbeat
        self.rows = program.dataset(plan)
        self.skipped, self.skipped_count = self.rows.dataset.skipped, self.rows.dataset.skipped_count
        self.held_out = program.eval_dataset()
        self.eval_plan = program.eval_plan(plan.workers, len(self.held_out)) if self.held_out else None
        if config.steps == 0 and not self.eval_plan:
            raise ConfigError("steps: 0 only evaluates, and there is no `eval` section; add one, or give steps")
        check_losses(plan.flow, config.base)
        self.plans = [p for p in (plan if config.steps != 0 else None, self.eval_plan) if p]
        self.network = Network(config, self.plans, self._model_layouts(), heartbeat, rendezvous)
        if rank == 0:
            describe_run(config, self.plans[0], list_hosts(self.network.identities))
        self.checkpoint = self._checkpoint(resume)
        self.source = self._open_model()
        self.steps = max(1, len(self.rows) // config.data.batch) if config.steps is None else config.steps
        heartbeat.start_task(-1, "load models")
        self.hybrid_mesh = cache(self.network.mesh)
        self.generates = {n.role: p.partition_of(n.id).layout for p in self.plans for n in p.flow.nodes if n.generates}
        self.roles: dict[str, Any] = {}
        # In the same order on all ranks, which may create process groups for them; those with engines first.
        for name in sorted(_roles(self.plans, rank), key=lambda role: (role not in self.generates, role)):
            self.roles[name] = self._make_role(name)
        self.data = self._coordinator(plan, Loader(self.rows, config.data.batch, program.repeat, config.seed))
        self.stop_requested = stop_requested
        self.rollouts = Rollouts(plan)
        self.checkpoints = CheckpointManager(program, plan, rank, self.network, self.roles, self.data, self.rollouts)
        self.first = self.checkpoints.resume(resume) if self.steps else 0  # the step after which this run starts
        self.progress = None
        if rank == 0:
            hosts = [i.host for i in self.network.identities]
            info = RunInfo(
                config.run_folder.name, config.run_folder, redact(config.model_dump(mode="json")), self.first
            )
            self.progress = Progress(
                config.run_folder,
                self.steps,
                self.skipped,
                self.skipped_count,
                self.first,
                hosts,
                start_trackers(config.track, info),
            )
        self.metrics = MetricsReducer(rank, self.network.all_ranks, self.progress)
        self.link = Link(WeightVersions(rank, plan, self.roles, self.first))
        self.recorder = self._recorder()
        self.evaluation = self._evaluation()
        self._stop_step: int | None = None  # where the run ends early, as some worker was asked to

    def run(self) -> None:
        self._check_fields()
        self.heartbeat.start_task(-1, "wait for all workers")  # some take longer than others to load models
        self._start_recording()
        run = self.network.transport.run
        if self.evaluation and not self.first:
            at = read_state(self.checkpoint)["step"] if self.checkpoint else 0
            run(self._after_step(at, StepMetrics()))
            self.recorder.end_step(at)
        if self.steps:
            worker = self._worker(self.plan, self.data)
            if self.network.overlap:
                self.link = worker.link = self._overlap(worker)
            try:
                hooks = self._end_of_step, self._after_step, self._after_chain
                run(worker.steps(self.first, self.steps, *hooks))
            except DistflowError as e:
                self.recorder.fail(self.heartbeat.step, str(e))
                raise
        self.heartbeat.start_task(self.steps, "finish")
        if self.steps > self.first:
            self.checkpoints.finish(self.steps)
        self.metrics.wait()
        self.network.leave_together()

    def close(self) -> None:
        self.metrics.close()
        self.recorder.close()
        self.checkpoints.close()
        self.data.close()
        for role in self.roles.values():
            if hasattr(role, "close"):
                role.close()
        if self.progress:
            self.progress.close()
        self.network.close()

    def _checkpoint(self, resume: str | None) -> Path | None:
        """Returns the checkpoint to evaluate, if there is nothing else to do."""
        from distflow.checkpoint.model import find_checkpoint

        if resume is None or self.config.steps != 0:
            return None
        return find_checkpoint(self.config.run_folder, resume)

    def _open_model(self) -> Any:
        """Opens the model of the config, if it names one, and checks that it can read all prompts."""
        if not self.config.model:
            return None
        from distflow.checkpoint.model import find_role, open_checkpoint
        from distflow.model.prompt_check import check_prompts, texts
        from distflow.model.source import open_model
        from distflow.model.text import Text, prompt_limit

        config, all_ranks = self.config, self.network.all_ranks
        self.heartbeat.start_task(-1, "check the prompts")
        if self.checkpoint:
            source = open_checkpoint(find_role(self.checkpoint, "actor"))
        else:
            source = open_model(self.config.model, lambda: texts(self.rows), config.base, config.seed)
        text = Text(source, prompt_limit(source, config.rollout.max_tokens, config.data.max_prompt))
        with self.heartbeat.waiting(all_ranks):
            skip = config.data.on_bad_row == "skip"
            checked = check_prompts(self.rows, text, skip, self.rank, len(all_ranks), self.network.all_reduce)
            if self.held_out:
                check_prompts(self.held_out, text, False, self.rank, len(all_ranks))
        self.rows, self.skipped = checked.rows, [*self.skipped, *checked.skipped]
        self.skipped_count += checked.count
        return source

    def _make_role(self, name: str) -> Any:
        """Makes the object that implements a role on this worker."""
        config, network = self.config, self.network
        implementation, args = self.program.implementation(name), dict(self.program.role_bindings[name].args)
        if _takes_role_context(implementation):
            args["role"] = RoleContext(
                name=name,
                rank=self.rank,
                layouts=_layouts(self.plans, name),
                meshes=network.meshes,
                hybrid_mesh=self.hybrid_mesh,
                topology=network.topology,
                device=network.device,
                source=self.source,
                rollout=config.rollout,
                train=config.train,
                critic=config.critic,
                max_prompt=config.data.max_prompt,
                steps=self.steps,
                seed=config.seed,
                base=config.base,
                generates=self.generates,
                roles=self.roles,
            )
        return implementation(**args)

    def _check_fields(self) -> None:
        """Lets roles that can tell, such as rewards, refuse what they will be given, before anything is generated."""
        for plan in self.plans:
            for node in plan.flow.nodes:
                check = getattr(self.roles.get(node.role), "check_fields", None)
                if check is not None and node.method:
                    check([node.local_name(f) for f in node.reads], "eval: " if plan is self.eval_plan else "")
        for role in self.roles.values():
            for rows in (self.rows, self.held_out) if hasattr(role, "check_rows") else ():
                if rows is not None:
                    role.check_rows(rows, self.rank, self.plan.workers)

    def _model_layouts(self) -> list[Layout]:
        """Returns the layouts of the roles that ask for a RoleContext."""
        roles = {n.role for p in self.plans for n in p.flow.nodes if n.method}
        wanted = [r for r in sorted(roles) if _takes_role_context(self.program.implementation(r))]
        return list(dict.fromkeys(layout for r in wanted for layout in _layouts(self.plans, r).values()))

    def _coordinator(self, plan: Plan, loader: Loader) -> Coordinator:
        return Coordinator(self.rank, plan, loader, self.network.topology)

    def _worker(self, plan: Plan, data: Coordinator) -> Worker:
        config = self.config
        recorder = self.recorder if plan is self.plan else self.recorder.held_out()
        on_task, held_out = self.heartbeat.start_task, plan is self.eval_plan
        place, ahead = (config.seed, config.run_folder), (self.link, self.rollouts)
        return Worker(self.rank, plan, data, self.roles, *place, on_task, recorder, self.steps, held_out, *ahead)

    def _overlap(self, worker: Worker) -> Overlap:
        """Gives the communication of this worker's steps a thread of its own."""
        assert self.network.overlap
        transport, waiting = self.network.overlap, self.heartbeat.waiting
        stop, sent = self.stop_requested, transport.sent
        link = Overlap(worker, self.evaluation, self.metrics, transport.run, waiting, stop, sent)
        link.start(self.first, self.steps)
        return link

    def _recorder(self) -> Recorder:
        config, record = self.config, self.config.record
        pieces = text_of_tokens(self.source.tokenizer) if self.source else None
        sent = self.network.transport.sent
        recorder = Recorder.make(config.run_folder, self.rank, sent, record.spans, record.samples, pieces)
        if self.progress and recorder.samples:
            recorder.samples.listener = self.progress.on_samples
        return recorder

    def _start_recording(self) -> None:
        """Waits for all workers, and agrees with them on what time it is."""
        now = self.network.all_reduce(torch.tensor([time.time()], dtype=torch.float64), torch.maximum)
        self.recorder.open(float(now), self.first, len(self.network.all_ranks))
        self.heartbeat.on_wait = self.recorder.waited

    def _evaluation(self) -> Evaluation | None:
        plan = self.eval_plan
        if not (plan and self.held_out and self.config.eval):
            return None
        loader = Loader(self.held_out, plan.samples // plan.repeat, plan.repeat, 0, rewind=True)
        return Evaluation(self._worker(plan, self._coordinator(plan, loader)), self.config.eval.every, self.steps)

    def _after_step(self, step: int, metrics: StepMetrics) -> Communication[None]:
        """Evaluates if it is time to, and reduces the metrics; the vote whether to stop goes with them."""
        if self.evaluation:
            yield from self.evaluation(step, metrics)
        if self.network.device.type != "cpu":
            metrics.log("perf/device_peak_mib", torch.accelerator.max_memory_allocated() / (1 << 20), reduce="max")
        with self.recorder.span(step, "control", "metrics"):
            stop = yield from self.link.reduce(self.metrics, step, metrics, self.stop_requested())
        if stop and self._stop_step is None:
            # What all workers have done by now. Those ahead still make the rollouts that belong to its state.
            self._stop_step = step + self.plan.staleness
            self._copy_state(self._stop_step)

    def _after_chain(self, step: int, metrics: StepMetrics) -> None:
        if isinstance(self.link, Overlap):
            self.link.after_chain(step, metrics)
        if self.checkpoints.due(step):
            self._copy_state(step)

    def _copy_state(self, step: int) -> None:
        """Copies what a checkpoint keeps of this worker, if it goes on before all workers have done `step`."""
        if self.plan.staleness and step <= self.steps:
            self.checkpoints.copy(step)

    def _end_of_step(self, step: int, metrics: StepMetrics) -> None:
        stop = step == self._stop_step
        if stop or self.checkpoints.due(step):
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
