"""A run on one worker: opens data and models with the others, runs the steps, saves, closes."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distflow.checkpoint.store import read_state, verify
from distflow.cluster.identity import list_hosts
from distflow.cluster.rendezvous import Rendezvous
from distflow.cluster.world import World
from distflow.comm.collectives import Communication
from distflow.config import Config
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.dataset.view import DatasetView
from distflow.device.offer import offer_of
from distflow.errors import ConfigError, DistflowError, StoppedError
from distflow.liveness.heartbeat import Heartbeat
from distflow.model.images import Images, open_images
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.observe.progress import Progress
from distflow.observe.recorder import Recorder
from distflow.observe.samples import text_of_tokens
from distflow.observe.trackers import start_trackers
from distflow.observe.trackers.tracker import RunInfo
from distflow.plan import Plan
from distflow.plan.field_bytes import has_references
from distflow.roles.role import Role
from distflow.run.async_comm import AsyncComm, CommThread
from distflow.run.checkpoint_manager import CheckpointManager
from distflow.run.choosing import choose_for
from distflow.run.comm import Comm
from distflow.run.description import describe_run
from distflow.run.earlier_runs import keep_earlier_run, say_changes
from distflow.run.evaluation import Evaluation
from distflow.run.program import Program
from distflow.run.redaction import redact
from distflow.run.role_objects import RankContext, make_roles, mesh_shapes
from distflow.run.rollouts import Rollouts
from distflow.run.versions import Versions
from distflow.run.worker import Surroundings, Worker
from distflow.train.update_spec import check_losses
from distflow.util.patient_files import WholeFiles, WriteErrors

logger = logging.getLogger(__name__)


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
    What an earlier attempt of the same `owner` has written is this run's own.

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
        owner: str = "",
    ) -> None:
        self.check_owner, self.owner = check_owner, owner
        self.program, self.config, self.plan, self.rank = program, program.config, plan, rendezvous.rank
        self.heartbeat, self.stop_requested = heartbeat, stop_requested
        self.files = WholeFiles()
        # 1. Alone.
        self.inputs = Inputs.open(program, plan)
        self.plans = self.inputs.plans
        # 2. Meet the other workers.
        self.world = World(self.config, self.plans, mesh_shapes(program, self.plans), heartbeat, rendezvous)
        # 3. Open the model, and drop prompts that it cannot read.
        self.source, self.inputs = self._open_model()
        self.config = self._choose()
        # 4. Load the models of roles.
        rows, data = self.inputs.rows, self.config.data
        self.steps = self.config.steps_of(len(rows))
        self.roles = self._make_roles()
        # 5. Restore the state of a checkpoint.
        self.curriculum = program.curriculum(rows, plan)
        loader = Loader(rows, data.batch, program.repeat, self.config.seed, False, data.shuffle, self.curriculum)
        self.data = self._coordinator(plan, loader)
        self.rollouts = Rollouts(plan)
        self.checkpoints = CheckpointManager(program, self.world, self.roles, self.data, self.rollouts, rows)
        self.first = self.checkpoints.resume(resume) if self.steps else 0  # the step after which this run starts
        # 6. Open the logs, and make the workers of the plans.
        if self.rank == 0:
            self._describe()
        self.progress = self._open_progress() if self.rank == 0 else None
        self.metrics = MetricsReducer(self.rank, self.world.all_ranks, self.progress, self.config.checkpoint.best)
        self.recorder = self._open_recorder()
        around = Surroundings(self.config.seed, self.config.run_folder, heartbeat.start_task, self.recorder)
        versions = Versions(plan.staleness, self.first, self.steps)
        followed = None if plan.flow.sampling_node else self.curriculum  # prompts of a step are not in its place there
        self.comm = Comm(self.rank, plan, self.roles, versions, followed)
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
            self.checkpoints.finish(self.steps, self.metrics.take_kept(self.steps))
        self.metrics.wait()
        if self.rank == 0:
            self.check_owner()
        self.world.leave_together()

    def _evaluate_first(self) -> None:
        """Evaluates before the first step, or all there is to evaluate. No vote yet: a run stops after a step."""
        step = read_state(self.program.checkpoint)["step"] if self.program.checkpoint else 0
        self.world.transport.run(self._end_metrics(step, StepMetrics(), lambda: False))
        self.recorder.end_step(step)

    def _train(self, worker: Worker) -> None:
        if self.world.overlap:  # the communication of steps has a thread of its own
            transport = self.world.overlap
            waiting, device = self.heartbeat.waiting, self.world.device
            thread = CommThread(transport.run, transport.sent, waiting, self.stop_requested, device)
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
        self.images: Images | None = None
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
        self.images = open_images(source, inputs.rows, inputs.held_out)
        text = Text(
            source,
            prompt_limit(source, config.rollout.max_tokens, config.data.max_prompt),
            config.data.rendered,
            config.data.chat_template_kwargs,
            self.images,
        )
        with self.heartbeat.waiting(all_ranks):
            skip = config.data.on_bad_row == "skip"
            checked = check_prompts(inputs.rows, text, skip, self.rank, len(all_ranks), self.world.all_reduce)
            if inputs.held_out:
                check_prompts(inputs.held_out, text, False, self.rank, len(all_ranks))
        skipped = [*inputs.skipped, *checked.skipped]
        count = inputs.skipped_count + checked.count
        return source, replace(inputs, rows=checked.rows, skipped=skipped, skipped_count=count)

    def _choose(self) -> Config:
        """Returns the config with what is chosen for the devices: the same on all workers, for the smallest of them."""
        device = self.world.device
        if offer := offer_of(device):
            least = self.world.all_reduce(torch.tensor([offer.memory, int(offer.bfloat16)]), torch.minimum)
            offer = replace(offer, memory=int(least[0]), bfloat16=bool(least[1]))
        chosen = choose_for(self.program, self.inputs.plan, self.source, device, offer)
        if chosen.choices and self.rank == 0:
            assert offer
            logger.info("chosen for %s: %s", offer.name, "; ".join(map(str, chosen.choices)))
        chosen.process.apply()
        return chosen.config

    def _verify(self, checkpoint: Path) -> None:
        """Verifies a checkpoint, of which every worker reads a share."""
        problem = verify(checkpoint, self.rank, len(self.world.all_ranks), "state")
        if self.world.any_rank(problem is not None):
            problem = problem or f"{checkpoint} is damaged, as another worker has found"
            raise ConfigError(f"{problem}; name another checkpoint")

    def _make_roles(self) -> dict[str, Role]:
        self.heartbeat.start_task(-1, "load models")
        world = self.world
        of_layouts, model = (world.meshes, world.sequence_groups), (self.source, self.images)
        context = RankContext(self.rank, *of_layouts, world.topology, world.device, *model, self.steps)
        return make_roles(self.program, self.config, self.plans, context)

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

    def _coordinator(self, plan: Plan, loader: Loader) -> Coordinator:
        data = Coordinator(self.rank, plan, loader, self.world.topology)
        if self.images:
            data.on_free |= {f: self.images.free for f in plan.flow.writer if has_references(f)}
        return data

    def _describe(self) -> None:
        """Writes what is run, and says what becomes of a run that was here before."""
        if self.first:
            assert self.checkpoints.resumed_run
            say_changes(self.checkpoints.resumed_run, self.program.config)
            if self.first >= self.steps:
                text = "nothing is left to do: the checkpoint is of step %d, and the run has %d steps; raise steps"
                logger.warning(text, self.first, self.steps)
        else:
            keep_earlier_run(self.config.run_folder, self.owner)
        hosts, commits = list_hosts(self.world.identities), self.program.data_commits
        describe_run(self.program.config, self.plans[0], hosts, self.files, commits, self.owner)

    def _open_progress(self) -> Progress:
        config, inputs = self.config, self.inputs
        folder, settings = config.run_folder, redact(config.model_dump(mode="json"))
        trackers = start_trackers(
            {name: t.model_dump() for name, t in config.track.items()},
            RunInfo(folder.name, folder, settings, self.first),
        )
        hosts = [i.host for i in self.world.identities]
        return Progress(
            folder, self.steps, inputs.skipped, inputs.skipped_count, self.first, hosts, trackers, self.files
        )

    def _open_recorder(self) -> Recorder:
        config, record = self.config, self.config.record
        pieces = text_of_tokens(self.source.tokenizer) if self.source else None
        pictures = self.images.pictures if self.images else None
        sent = self.world.transport.sent
        recorder = Recorder.make(config.run_folder, self.rank, sent, record.spans, record.samples, pieces, pictures)
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
            torch.accelerator.reset_peak_memory_stats()
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
        if step == self.first + 1:
            self.world.end_start()
        stop = step == self.comm.versions.stop_step
        if stop or self.checkpoints.due(step):
            self.check_owner()
            with self.recorder.span(step, "checkpoint", "save"):
                self.checkpoints.save(step, self.metrics.take_kept(step))
        self.recorder.end_step(step, local=int(metrics.totals.get(("data/bytes_local", "mean"), (0, 0))[0]))
        if stop and step < self.steps:
            self.checkpoints.finish(None)
            self.metrics.wait()
            raise StoppedError(
                f"stopped on request after step {step} of {self.steps}, which is saved; continue with --resume"
            )
