"""What one worker does in a run: open data and models with the others, walk the steps, save, close."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

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
from distflow.run.worker import Worker


class Job:
    """`resume`: from the newest checkpoint of the run, or from where it says; `told_to_stop` is asked after a step."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        rank: int,
        heartbeat: Heartbeat,
        resume: str | None = None,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        config = program.config
        self.program, self.config, self.plan, self.rank, self.heartbeat = program, config, plan, rank, heartbeat
        self.rows = program.dataset(plan)
        self.skipped, self.skipped_count = self.rows.rows.skipped, self.rows.rows.skipped_count
        self.held_out = program.eval_dataset()
        self.eval_plan = program.eval_plan(plan.workers, len(self.held_out)) if self.held_out else None
        if config.steps == 0 and not self.eval_plan:
            raise ConfigError("steps: 0 only evaluates, and there is no `eval` section; add one, or give steps")
        self.plans = [p for p in (plan if config.steps != 0 else None, self.eval_plan) if p]
        self.network = Network(config, self.plans, self._model_layouts(), heartbeat)
        self.network.agree(config, plan)
        self.source = self._open_model()
        self.steps = max(1, len(self.rows) // config.data.batch) if config.steps is None else config.steps
        heartbeat.doing(-1, "load models")
        self.roles = {name: self._make_role(name) for name in _roles(self.plans, rank)}
        self.data = self._coordinator(plan, Loader(self.rows, config.data.batch, program.repeat, config.seed))
        self.told_to_stop = told_to_stop
        self.checkpoints = CheckpointManager(program, plan, rank, self.network, self.roles, self.data)
        self.first = self.checkpoints.resume(resume) if self.steps else 0
        self.progress = None
        if rank == 0:
            self.progress = Progress(config.run_folder, self.steps, self.skipped, self.skipped_count, self.first)
        group = self.network.group(self.network.everybody) if plan.workers > 1 else None
        self.metrics = MetricsReducer(group, self.progress)

    def run(self) -> None:
        evaluation = self._evaluation()
        self.heartbeat.doing(-1, "start together")  # loading models takes some longer than others
        self.network.wait_for_all()
        drive = self.network.comm.drive
        if evaluation and not self.first:
            before = StepMetrics()
            drive(evaluation(-1, before))
            self._end_of_step(-1, before)
        if self.steps:
            worker = self._worker(self.plan, self.data)
            drive(worker.steps(self.first, self.steps, self._end_of_step, *([evaluation] if evaluation else [])))
        self.heartbeat.doing(self.steps, "finish")
        if self.steps > self.first:
            self.checkpoints.finish(self.steps)
        with self.heartbeat.waiting(self.network.everybody):
            self.metrics.wait(0)
            dist.barrier()

    def close(self) -> None:
        self.metrics.close()
        self.checkpoints.close()
        self.data.close()
        for role in self.roles.values():
            if hasattr(role, "close"):
                role.close()
        if self.progress:
            self.progress.close()
        dist.destroy_process_group()

    def _open_model(self) -> Any:
        """The model that the config names, if it does; prompts that it could not take are found now."""
        if not self.config.model:
            return None
        from distflow.engine.model.prompt_check import check_prompts, texts
        from distflow.engine.model.source import open_model
        from distflow.engine.model.text import Text, prompt_limit

        config, everybody = self.config, self.network.everybody
        self.heartbeat.doing(-1, "look at the prompts")
        source = open_model(self.config.model, lambda: texts(self.rows), config.base, config.seed)
        text = Text(source, prompt_limit(source, config.rollout.max_tokens, config.data.max_prompt))
        with self.heartbeat.waiting(everybody):
            seen = check_prompts(self.rows, text, config.data.on_bad_row == "skip", self.rank, len(everybody))
            if self.held_out:
                check_prompts(self.held_out, text, False, self.rank, len(everybody))
        self.rows, self.skipped = seen.rows, [*self.skipped, *seen.skipped]
        self.skipped_count += seen.count
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
                process_groups=network.process_groups,
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
        return Coordinator(self.rank, plan, loader, self.network.device)

    def _worker(self, plan: Plan, data: Coordinator) -> Worker:
        config = self.config
        return Worker(self.rank, plan, data, self.roles, config.seed, config.run_folder, self.heartbeat.doing)

    def _evaluation(self) -> Evaluation | None:
        plan = self.eval_plan
        if not (plan and self.held_out and self.config.eval):
            return None
        loader = Loader(self.held_out, plan.samples // plan.repeat, plan.repeat, 0)
        return Evaluation(self._worker(plan, self._coordinator(plan, loader)), self.config.eval.every, self.steps)

    def _end_of_step(self, step: int, metrics: StepMetrics) -> None:
        self.metrics.submit(step, metrics)
        with self.heartbeat.waiting(self.network.everybody):
            self.metrics.wait()
        if step < 0:
            return
        stop = self.network.any_of_us(self.told_to_stop())
        if stop or self.checkpoints.due(step + 1):
            self.checkpoints.save(step + 1)
        if stop and step + 1 < self.steps:
            self.checkpoints.finish(None)
            self.metrics.wait(0)
            raise StoppedError(
                f"stopped as told, after step {step + 1} of {self.steps}, which is kept; go on with --resume"
            )


def _roles(plans: list[Plan], rank: int) -> list[str]:
    """Roles that are played by an object, and of which this rank's chains call a method or hand over weights."""
    found: dict[str, None] = {}
    for plan in plans:
        for t in plan.chain(rank):
            if isinstance(t, Weights):
                found[t.role] = None
            elif isinstance(t, Run) and plan.flow.node(t.node).method:
                found[plan.flow.node(t.node).role] = None
    return list(found)


def _layouts(plans: list[Plan], role: str) -> dict[str, Layout]:
    """Method → where the role's nodes of that name run."""
    return {
        n.call.rpartition(".")[2]: p.partition_of(n.id).layout
        for p in plans
        for n in p.flow.nodes
        if n.role == role and n.method
    }


def _takes_role_context(implementation: Any) -> bool:
    return "role" in inspect.signature(implementation).parameters
