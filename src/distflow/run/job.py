"""What one worker does in a run: open data and models with the others, run the steps, save, close."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from distflow.data.collectives import Communication
from distflow.data.coordinator import Coordinator
from distflow.data.loader import Loader
from distflow.engine.role_context import RoleContext
from distflow.errors import ConfigError, StoppedError
from distflow.observe.heartbeat import Heartbeat
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.observe.progress import Progress
from distflow.plan import Layout, Plan, Run, Weights
from distflow.run.checkpoint_manager import CheckpointManager
from distflow.run.evaluation import Evaluation
from distflow.run.network import Network
from distflow.run.program import Program
from distflow.run.rendezvous import Rendezvous
from distflow.run.run_dir import describe_run
from distflow.run.worker import Worker


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
        self.plans = [p for p in (plan if config.steps != 0 else None, self.eval_plan) if p]
        self.network = Network(config, self.plans, self._model_layouts(), heartbeat, rendezvous)
        if rank == 0:
            describe_run(config)
        self.source = self._open_model()
        self.steps = max(1, len(self.rows) // config.data.batch) if config.steps is None else config.steps
        heartbeat.start_task(-1, "load models")
        # In the same order on all ranks, which may create process groups for them.
        self.hybrid_mesh = cache(self.network.mesh)
        self.roles = {name: self._make_role(name) for name in sorted(_roles(self.plans, rank))}
        self.data = self._coordinator(plan, Loader(self.rows, config.data.batch, program.repeat, config.seed))
        self.stop_requested = stop_requested
        self.checkpoints = CheckpointManager(program, plan, rank, self.network, self.roles, self.data)
        self.first = self.checkpoints.resume(resume) if self.steps else 0
        self.progress = None
        if rank == 0:
            hosts = [i.host for i in self.network.identities]
            self.progress = Progress(config.run_folder, self.steps, self.skipped, self.skipped_count, self.first, hosts)
        self.metrics = MetricsReducer(rank, self.network.all_ranks, self.progress)
        self.evaluation = self._evaluation()
        self._stop = False  # any rank was asked to end the run

    def run(self) -> None:
        self.heartbeat.start_task(-1, "wait for all workers")  # some take longer than others to load models
        self.network.barrier()
        run = self.network.transport.run
        if self.evaluation and not self.first:
            run(self._after_step(-1, StepMetrics()))
        if self.steps:
            worker = self._worker(self.plan, self.data)
            run(worker.steps(self.first, self.steps, self._end_of_step, self._after_step))
        self.heartbeat.start_task(self.steps, "finish")
        if self.steps > self.first:
            self.checkpoints.finish(self.steps)
        self.metrics.wait()
        self.network.barrier()

    def close(self) -> None:
        self.metrics.close()
        self.checkpoints.close()
        self.data.close()
        for role in self.roles.values():
            if hasattr(role, "close"):
                role.close()
        if self.progress:
            self.progress.close()
        self.network.close()

    def _open_model(self) -> Any:
        """Opens the model of the config, if it names one, and checks that it can read all prompts."""
        if not self.config.model:
            return None
        from distflow.engine.model.prompt_check import check_prompts, texts
        from distflow.engine.model.source import open_model
        from distflow.engine.model.text import Text, prompt_limit

        config, all_ranks = self.config, self.network.all_ranks
        self.heartbeat.start_task(-1, "check the prompts")
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
            )
        return implementation(**args)

    def _model_layouts(self) -> list[Layout]:
        """Returns the layouts of the roles that ask for a RoleContext."""
        roles = {n.role for p in self.plans for n in p.flow.nodes if n.method}
        wanted = [r for r in sorted(roles) if _takes_role_context(self.program.implementation(r))]
        return list(dict.fromkeys(layout for r in wanted for layout in _layouts(self.plans, r).values()))

    def _coordinator(self, plan: Plan, loader: Loader) -> Coordinator:
        return Coordinator(self.rank, plan, loader, self.network.topology)

    def _worker(self, plan: Plan, data: Coordinator) -> Worker:
        config = self.config
        return Worker(self.rank, plan, data, self.roles, config.seed, config.run_folder, self.heartbeat.start_task)

    def _evaluation(self) -> Evaluation | None:
        plan = self.eval_plan
        if not (plan and self.held_out and self.config.eval):
            return None
        loader = Loader(self.held_out, plan.samples // plan.repeat, plan.repeat, 0)
        return Evaluation(self._worker(plan, self._coordinator(plan, loader)), self.config.eval.every, self.steps)

    def _after_step(self, step: int, metrics: StepMetrics) -> Communication[None]:
        """Evaluates if it is time to, and reduces the metrics; the vote whether to stop goes with them."""
        if self.evaluation:
            yield from self.evaluation(step, metrics)
        if self.network.device.type != "cpu":
            metrics.log("perf/device_peak_mib", torch.accelerator.max_memory_allocated() / (1 << 20), reduce="max")
        self._stop = yield from self.metrics.reduce(step, metrics, vote=self.stop_requested())

    def _end_of_step(self, step: int, metrics: StepMetrics) -> None:
        if self._stop or self.checkpoints.due(step + 1):
            self.checkpoints.save(step + 1)
        if self._stop and step + 1 < self.steps:
            self.checkpoints.finish(None)
            self.metrics.wait()
            raise StoppedError(
                f"stopped on request after step {step + 1} of {self.steps}, which is saved; continue with --resume"
            )


def _roles(plans: list[Plan], rank: int) -> list[str]:
    """Returns the roles of whose objects this rank's chains call a method, or move the weights."""
    roles: dict[str, None] = {}
    for plan in plans:
        for t in plan.chain(rank):
            if isinstance(t, Weights):
                roles[t.role] = None
            elif isinstance(t, Run) and plan.flow.node(t.node).method:
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
