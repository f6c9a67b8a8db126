"""Plants realistic bugs, one at a time, in a copy of the tree, and runs the tests that should notice.

    python bench/mutations.py [--only WORD ...] [--minutes M] [--results FILE] [--list | --check]

A bug is killed if a test fails, or does not end, that passes without it; it survives if all of its tests pass. The
tests of a bug are named beside it, the likeliest first, and run until one fails. `--only` chooses by parts of the name
of a bug or of its file. Results are kept in a file, so that a run that was cut off, or ended after `--minutes`, is
continued; a bug whose text or tests have changed since is planted again. `--check` only finds bugs whose text is no
longer in the code, which are to be planted anew by hand; they count as neither killed nor survived.

The last line is one JSON object; the exit code is 1 if a bug survived or cannot be planted.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/distflow")
TEST_LIMIT_S = 300.0  # for the tests of one bug on an idle machine; the most that a test may hang
GOAL = 0.95


@dataclass(frozen=True)
class Bug:
    """A text of a file, in which it occurs once, what stands there instead, and the tests that should notice."""

    name: str
    file: str  # below the package
    text: str
    instead: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()[:16]

    @contextmanager
    def planted(self, tree: Path) -> Iterator[None]:
        """Plants it in a tree, and mends it in the end."""
        path = tree / SOURCE / self.file
        before, stat = path.read_text(), path.stat()
        path.write_text(before.replace(self.text, self.instead))
        # Bytecode is known by the second and the size of its file: each bug has a second of its own.
        os.utime(path, (stat.st_atime, 1_000_000_000 + BUGS.index(self)))
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def bug(name: str, file: str, text: str, instead: str, *tests: str) -> Bug:
    return Bug(name, file, text, instead, tuple(f"tests/{t}" for t in tests))


GOLDEN = "distributed/test_golden_curves.py::test_a_flow_has_its_golden_curve"
TUNED = f"{GOLDEN}[grpo_tuned]"
OPTIMIZER = "distributed/test_optimizer.py"
BUGS = [
    # From the config to the trainer.
    bug(
        "the trainer ignores the temperature",
        "train/trainer.py",
        "temperature=role.rollout.temperature or 1.0)",
        "temperature=1.0)",
        TUNED,
    ),
    bug("betas are ignored", "train/trainer.py", "betas=config.betas, ", "", TUNED),
    bug("eps is ignored", "train/trainer.py", "eps=config.eps, ", "", TUNED),
    bug(
        "weight decay of norms",
        "train/trainer.py",
        '"weight_decay": 0.0}',
        '"weight_decay": config.weight_decay}',
        OPTIMIZER,
    ),
    bug(
        "a skipped gradient is kept",
        "train/trainer.py",
        "        self.model.zero_grad()\n",
        "        if math.isfinite(norm):\n            self.model.zero_grad()\n",
        OPTIMIZER,
    ),
    bug(
        "a skipped update is counted by each rank",
        "train/trainer.py",
        'skipped_updates", 1 / self.dp, reduce',
        'skipped_updates", 1, reduce',
        OPTIMIZER,
    ),
    bug(
        "the gradient is not clipped",
        "train/trainer.py",
        "if norm > self.config.clip_grad > 0:",
        "if norm > self.config.clip_grad > 1e9:",
        OPTIMIZER,
    ),
    bug(
        "the loss is a mean over ranks",
        "train/trainer.py",
        "(total * self.dp).backward()",
        "total.backward()",
        "distributed/test_gradients.py",
    ),
    bug(
        "mini-batches are halves, not round-robin",
        "train/trainer.py",
        "np.searchsorted(ctx.groups, batch.groups) % spec.mini_batches",
        "np.searchsorted(ctx.groups, batch.groups) * spec.mini_batches // len(ctx.groups)",
        f"{GOLDEN}[grpo]",
    ),
    bug(
        "old log-probs are this update's",
        "train/trainer.py",
        "        columns[OLD] = batch[old]\n",
        "        pass\n",
        f"{GOLDEN}[grpo]",
    ),
    bug(
        "warm-up is one off",
        "train/lr_schedule.py",
        "config.lr * (update + 1) / warmup",
        "config.lr * update / warmup",
        "train/test_lr_schedule.py",
    ),
    bug(
        "the schedule forgets mini-batches",
        "train/update_spec.py",
        "role.steps * mini_batches * epochs,",
        "role.steps * epochs,",
        TUNED,
    ),
    bug(
        "ema decays by its complement",
        "train/ema.py",
        "self._weights, 1 - self.decay)",
        "self._weights, self.decay)",
        "distributed/test_second_model.py",
        "distributed/test_resume.py",
    ),
    bug(
        "packed responses share positions",
        "train/packing.py",
        "positions[_ranges(self.response_at, self.r)] = _ranges(self.p, self.r)",
        "positions[_ranges(self.response_at, self.r)] = _ranges(0 * self.p, self.r)",
        "train/test_packing.py",
        f"{GOLDEN}[sft]",
    ),
    bug(
        "gradients of log-probs forget the temperature",
        "train/logprobs.py",
        "                d_logits /= ctx.temperature\n",
        "                pass\n",
        "train/test_logprobs.py",
        TUNED,
    ),
    # Algorithms.
    bug(
        "the clip is symmetric",
        "algo/losses.py",
        "1 + (clip if clip_high is None else clip_high)",
        "1 + clip",
        "algo/test_losses.py",
        TUNED,
    ),
    bug(
        "GAE forgets gamma in its decay",
        "algo/returns.py",
        "remaining, gamma * lam)",
        "remaining, lam)",
        "algo/test_returns.py",
    ),
    bug(
        "leave-one-out divides by n",
        "algo/advantages.py",
        "(sizes.double() / (sizes - 1).clamp(min=1))[group]",
        "(sizes.double() / sizes.clamp(min=1))[group]",
        "algo/test_advantages.py",
    ),
    bug(
        "the weight of a token is that of its micro-batch",
        "algo/aggregate.py",
        "weights = torch.full_like(own_length, 1 / tokens)",
        "weights = torch.full_like(own_length, 1 / len(own_length))",
        "algo/test_aggregate.py",
    ),
    bug(
        "the correction scales the regularizer",
        "algo/tokens.py",
        "return weights * (self.per_token - self.regularizer) + self.regularizer",
        "return weights * self.per_token",
        "algo/test_correction.py",
        "algo/test_losses.py",
    ),
    bug(
        "label smoothing is twice",
        "algo/preferences.py",
        "-(1 - label_smoothing) * logsigmoid(margin)",
        "-logsigmoid(margin)",
        "algo/test_preferences.py",
    ),
    bug(
        "the overlong penalty starts at the limit",
        "algo/reward_shaping.py",
        "lengths.double() - (limit - buffer)",
        "lengths.double() - limit",
        "algo/test_reward_shaping.py",
    ),
    bug(
        "the KL controller has the wrong sign",
        "algo/kl_control.py",
        "exponent = rate * (kl / target - 1)",
        "exponent = rate * (1 - kl / target)",
        "algo/test_kl_control.py",
    ),
    bug(
        "turn rewards are added to the score",
        "flows/nodes.py",
        "score - torch.zeros_like(score).index_add(0, sample, turns), lengths, penalty) + turns",
        "score, lengths, penalty) + turns",
        "flows/test_conversations.py",
    ),
    bug("DAPO clips as PPO does", "flows/dapo.py", "clip_high=0.28,", "clip_high=0.2,", "config/test_defaults.py"),
    bug(
        "PPO forgets lambda",
        "flows/ppo.py",
        "gamma=gamma, lam=lam, kl=kl_in_reward)",
        "gamma=gamma, kl=kl_in_reward)",
        f"{GOLDEN}[ppo_tuned]",
    ),
    bug(
        "the critic's clip is its default",
        "flows/ppo.py",
        "clip=clip_value, **updates)",
        "clip=0.2, **updates)",
        f"{GOLDEN}[ppo_tuned]",
        "flows/test_flows.py",
    ),
    bug("Dr. GRPO divides by the deviation", "flows/dr_grpo.py", 'scale="none")', 'scale="std")', f"{GOLDEN}[dr_grpo]"),
    # The graph, the plan, the config.
    bug(
        "a default that turns a check off",
        "config/schema.py",
        "verify_every: int = Field(10, ge=0)",
        "verify_every: int = Field(0, ge=0)",
        "config/test_defaults.py",
    ),
    bug(
        "a default of checkpoints",
        "config/schema.py",
        "keep: int = Field(2, gt=0)",
        "keep: int = Field(1, gt=0)",
        "config/test_defaults.py",
    ),
    bug(
        "an override does not win",
        "config/loading.py",
        "        section[last] = parse(value)\n",
        "        section.setdefault(last, parse(value))\n",
        "config/test_config.py",
    ),
    bug(
        "two writers of a field",
        "flow/graph.py",
        "                if f in writer:\n",
        "                if f in writer and writer[f] != SOURCE:\n",
        "flow/test_graph.py",
        "flow",
    ),
    bug(
        "the unit of dynamic sampling is of one node",
        "plan/planner.py",
        "unit = math.lcm(*(self._unit(",
        "unit = max(*(self._unit(",
        "plan/test_planner.py",
    ),
    bug(
        "the unit of dynamic sampling counts samples",
        "plan/planner.py",
        "return layout.dp if whole_groups else layout.dp // math.gcd(layout.dp, self.workload.repeat)",
        "return layout.dp",
        "plan/test_planner.py",
    ),
    bug(
        "shares are not even",
        "plan/layout.py",
        "-(-replica * units // replicas), -(-(replica + 1) * units // replicas)",
        "replica * (units // replicas), (replica + 1) * (units // replicas) if replica + 1 < replicas else units",
        "plan/test_layout.py",
        "dataset/test_loader.py",
    ),
    bug(
        "staleness is one more",
        "plan/staleness.py",
        "return max(first, step - 1 - delay)",
        "return max(first, step - 2 - delay)",
        "run/test_versions.py",
        "run/test_overlap.py",
    ),
    # Data.
    bug(
        "the order of an epoch is that of the first",
        "dataset/loader.py",
        "len(self.dataset), self.seed, e)",
        "len(self.dataset), self.seed, 0)",
        "dataset/test_loader.py",
    ),
    bug(
        "the prefetch is of another step",
        "coordinator/coordinator.py",
        "self.loader.prefetch(step, replica, layout.dp)",
        "self.loader.prefetch(step + 1, replica, layout.dp)",
        "dataset",
        "coordinator",
        "test_every_field_arrives.py",
        "run/test_worker.py",
    ),
    bug(
        "bad rows are counted before they are skipped",
        "dataset/dataset.py",
        'side="right")) if len(self.bad)',
        'side="left")) if len(self.bad)',
        "dataset/test_dataset.py",
    ),
    bug(
        "samples are balanced by bytes",
        "comm/exchange.py",
        "weights = columns[move.fields.index(move.dst.balance)].lengths",
        "weights = sizes",
        "comm/test_exchange.py",
    ),
    bug(
        "the imbalance is that before the move",
        "comm/exchange.py",
        "imbalance(new, weights, dst.dp)",
        "imbalance(old, weights, src.dp)",
        "comm/test_exchange.py",
    ),
    bug(
        "nothing is balanced",
        "comm/routes.py",
        "np.ones(n, bool) if balance else moving)",
        "moving)",
        "comm/test_routes.py",
    ),
    bug(
        "one rank of a replica sends all",
        "comm/routes.py",
        "sender = (np.arange(len(slots)) + receiver) % len(replicas)",
        "sender = np.zeros(len(slots), np.int64)",
        "comm/test_routes.py",
    ),
    bug(
        "padding of a segment is forgotten",
        "comm/wire.py",
        "    base += segments.offsets + _aligned(headers)\n",
        "    base += segments.offsets + headers\n",
        "comm/test_wire.py",
    ),
    bug(
        "an all-gather is rotated",
        "comm/collectives.py",
        "gathered.roll(place, 0)",
        "gathered.roll(-place, 0)",
        "comm/test_collectives.py",
    ),
    bug(
        "the last prompts of a step are seen again",
        "coordinator/dynamic_sampling.py",
        "end = self.position if filled else int(positions[-1]) + 1",
        "end = self.position if filled else int(positions[-1])",
        "coordinator/test_dynamic_sampling.py",
    ),
    bug(
        "joined samples ignore gaps",
        "batch/batch.py",
        "if (self.starts == first + ends - counts).all():",
        "if True:",
        "batch/test_batch.py",
    ),
    bug(
        "a mask counts the first token twice",
        "batch/response_mask.py",
        "before[ends] - before[ends - self.response_lengths]",
        "before[ends] - before[np.maximum(ends - self.response_lengths - 1, 0)]",
        "batch/test_response_mask.py",
    ),
    # Weights.
    bug(
        "a checksum is blind to transposition",
        "weights/checksums.py",
        "mix(np.arange(low, high, dtype=np.uint64) + (np.uint64(dim) << np.uint64(48)))",
        "mix(np.arange(low, high, dtype=np.uint64))",
        "weights/test_checksums.py",
    ),
    bug(
        "a checksum is blind to the place of a part",
        "weights/checksums.py",
        "mix(np.arange(low, high,",
        "mix(np.arange(0, high - low,",
        "weights/test_checksums.py",
    ),
    bug(
        "other versions of weights pass",
        "weights/verify.py",
        "        if newest != -oldest:\n",
        "        if newest < -oldest:\n",
        "weights/test_verify.py",
    ),
    bug(
        "weights are verified the first time only",
        "roles/policy.py",
        "if every and self._weight_syncs % every == 0:",
        "if every and self._weight_syncs == 0:",
        "roles",
        "weights",
        "distributed/test_run.py",
        "distributed/test_lora.py",
    ),
    bug(
        "the first rows go to the last rank",
        "weights/shards.py",
        "box[tp_dim] = t * size, (t + 1) * size",
        "box[tp_dim] = (tp - 1 - t) * size, (tp - t) * size",
        "weights",
        "distributed/test_gradients.py",
    ),
    bug(
        "an adapter is merged without its scale",
        "model/lora.py",
        "torch.addmm(weight, *pair, alpha=scale)",
        "torch.addmm(weight, *pair)",
        "distributed/test_lora.py",
    ),
    # Rollouts.
    bug(
        "stop tokens end early",
        "rollout/sampling.py",
        "np.flatnonzero(positions < params.min_tokens)",
        "np.flatnonzero(positions + 1 < params.min_tokens)",
        "rollout/test_sampling.py",
    ),
    bug(
        "log-probs are of the truncated distribution",
        "rollout/sampling.py",
        "        if candidates is not scaled:\n",
        "        if allowed is not scaled:\n",
        "rollout/test_sampling.py",
        TUNED,
    ),
    bug(
        "the noise forgets the sample",
        "rollout/sampling.py",
        " + sample_ids.astype(np.uint64))",
        " + 0 * sample_ids.astype(np.uint64))",
        "rollout/test_sampling.py",
    ),
    bug(
        "a carried response has the newest version",
        "rollout/partial.py",
        "            weight_version=begun.weight_version,\n",
        "            weight_version=completion.weight_version,\n",
        "rollout/test_partial.py",
    ),
    bug(
        "log-probs of the beginning are lost",
        "rollout/partial.py",
        "logprobs=np.concatenate([begun.logprobs, completion.logprobs])",
        "logprobs=np.concatenate([0 * begun.logprobs, completion.logprobs])",
        "rollout/test_partial.py",
    ),
    bug(
        "the clip ratio is of finished responses",
        "rollout/responses.py",
        "1 - float(finished.float().mean())",
        "float(finished.float().mean())",
        "rollout/test_responses.py",
    ),
    bug(
        "the window of attention is one wider",
        "rollout/builtin/kv_cache.py",
        "hidden |= key <= positions[:, None] - window",
        "hidden |= key < positions[:, None] - window",
        "rollout/test_kv_cache.py",
        "rollout/test_generator.py",
        "rollout/test_history.py",
    ),
    bug(
        "pages of a history are given back",
        "rollout/builtin/page_pool.py",
        "reversed(sequence.pages[sequence.history_pages :])",
        "reversed(sequence.pages)",
        "rollout/test_history.py",
        "rollout/test_scheduler.py",
    ),
    bug(
        "a history is longer than it is shared",
        "rollout/builtin/history.py",
        "return next(i for i in range(most) if prompt[i] != self.tokens[i])",
        "return most",
        "rollout/test_history.py",
    ),
    # Rewards and conversations.
    bug(
        "turn rewards count twice",
        "agents/record.py",
        "total = sum(turn_rewards) if reward is None else float(reward)",
        "total = sum(turn_rewards) + float(reward or 0.0)",
        "agents/test_record.py",
    ),
    bug(
        "tool errors count twice",
        "agents/record.py",
        'int(own.pop("tool_errors", tool_errors))',
        'int(own.pop("tool_errors", 0)) + tool_errors',
        "agents/test_record.py",
    ),
    bug(
        "the longest branch is trained",
        "agents/session.py",
        "key=lambda b: (b.sampled_tokens, b.last))",
        "key=lambda b: (len(b.tokens), b.last))",
        "agents/test_record.py",
    ),
    bug(
        "the environment's tokens are trained",
        "agents/session.py",
        "self._append(branch, tokens, [0.0] * len(tokens), False)",
        "self._append(branch, tokens, [0.0] * len(tokens), True)",
        "agents/test_session.py",
    ),
    bug(
        "weights of reward functions are 1",
        "agents/record.py",
        "weights.get(name, 0.0) * value",
        "value",
        "agents/test_record.py",
    ),
    bug(
        "prompts of a group have different environments",
        "agents/choice.py",
        "mix(np.array([(seed + stream) & (2**64 - 1)], np.uint64)) + groups.astype(np.uint64))",
        "mix(np.array([(seed + stream) & (2**64 - 1)], np.uint64)) + np.arange(len(groups)).astype(np.uint64))",
        "agents/test_conversations_loop.py",
        "agents/test_environment_adapters.py",
    ),
    bug(
        "failures are counted per function",
        "reward/reward.py",
        "len({i for i, _, _ in failures})",
        "len(failures)",
        "reward/test_reward.py",
    ),
    bug(
        "a reward's weight is forgotten",
        "reward/reward.py",
        "total += function.weight * (result.value or 0.0)",
        "total += result.value or 0.0",
        "reward/test_reward.py",
    ),
    bug(
        "the deadline of a queued call is that of the first",
        "userproc/processes.py",
        "                    process.owed -= 1\n                    process.restart_clock()\n",
        "                    process.owed -= 1\n",
        "reward/test_reward_pool.py::test_a_call_that_was_queued_behind_others_has_its_whole_time",
        "reward/test_reward_pool.py",
    ),
    bug(
        "a wrong number of words is right",
        "sandbox/compare.py",
        "return len(words) == len(expected_words) and all(map(_same_number, words, expected_words))",
        "return all(map(_same_number, words, expected_words))",
        "sandbox/test_judge.py",
        "reward/test_code.py",
    ),
    bug(
        "a judge's verdict is not scaled",
        "roles/judge.py",
        "(value - least) / (most - least)",
        "value / most",
        "roles/test_judge_role.py",
    ),
    bug(
        "an unread verdict gets the highest score",
        "roles/judge.py",
        "[on_failure if s is None else s for s in read]",
        "[1.0 if s is None else s for s in read]",
        "roles/test_judge_role.py",
    ),
    # Runs, checkpoints, restarts.
    bug(
        "the worst checkpoint is kept",
        "run/checkpoint_manager.py",
        "return max(steps, key=lambda s: (values[s], s), default=None)",
        "return min(steps, key=lambda s: (values[s], s), default=None)",
        "distributed/test_resume.py::test_the_newest_and_the_best_are_kept",
    ),
    bug(
        "the best checkpoint is removed",
        "run/checkpoint_manager.py",
        "() if best is None else (best,))",
        "())",
        "distributed/test_resume.py::test_the_newest_and_the_best_are_kept",
    ),
    bug(
        "a resumed run starts one step late",
        "run/checkpoint_manager.py",
        '        return int(state["step"])\n',
        '        return int(state["step"]) + 1\n',
        "distributed/test_resume.py::test_a_resumed_run_is_the_uninterrupted_run_to_the_bit",
    ),
    bug(
        "the moments of Adam are lost in a checkpoint",
        "train/trainer.py",
        'if values["optimizer_steps"]:',
        'if values["optimizer_steps"] < 0:',
        "distributed/test_resume.py::test_a_resumed_run_is_the_uninterrupted_run_to_the_bit",
    ),
    bug(
        "checksums of a checkpoint are not compared",
        "checkpoint/store.py",
        "if sha256(file) != checksum else None",
        "if False else None",
        "checkpoint",
    ),
    bug(
        "evaluation under overlap is of another step",
        "run/worker.py",
        "return step if self.held_out else self.comm.versions.of(step)",
        "return self.comm.versions.of(step)",
        "run/test_overlap.py",
    ),
    bug(
        "weights for an evaluation are one step off",
        "run/async_comm.py",
        "self.evaluation.due(version)):\n            for role",
        "self.evaluation.due(version + 1)):\n            for role",
        "run/test_overlap.py",
    ),
    bug(
        "the restart counter is never reset",
        "cluster/restarts.py",
        "furthest, restart = newest, 0",
        "furthest, restart = newest, restart",
        "cluster/test_restarts.py",
    ),
    bug(
        "a checkpoint of before is progress",
        "cluster/restarts.py",
        "newest is not None and newest > furthest:",
        "newest is not None:",
        "cluster/test_restarts.py",
    ),
    bug(
        "the same exception is tried again",
        "liveness/failures.py",
        'failure.kind in ("node", "exception") and failure == previous',
        'failure.kind == "exception" and failure == previous',
        "liveness/test_failures.py",
        "distributed/test_restart.py",
    ),
    bug(
        "a Slurm step has the port of its job",
        "cluster/launch_env.py",
        "(31 * job + step)",
        "(31 * job)",
        "cluster/test_launch_env.py",
    ),
    # What is seen of a run.
    bug(
        "the least value is the largest",
        "observe/metrics.py",
        '"min": -maximum}',
        '"min": maximum}',
        "observe/test_metrics.py",
    ),
    bug(
        "a mean forgets its counts",
        "observe/metrics.py",
        "total += float(value) * count",
        "total += float(value)",
        "observe/test_metrics.py",
    ),
    bug(
        "sums of replicas are counted again",
        "observe/metrics.py",
        '        if reduce != "sum":\n',
        "        if True:\n",
        "observe/test_metrics.py",
    ),
    bug(
        "TensorBoard hides one step too many",
        "observe/trackers/to_tensorboard.py",
        "run.first + 1 if run.first",
        "run.first if run.first",
        "observe/test_trackers.py",
    ),
    bug(
        "a resumed run is a new one for W&B",
        "observe/trackers/to_wandb.py",
        'resume="allow" if run.first else None',
        "resume=None",
        "observe/test_trackers.py",
    ),
    bug(
        "a log is thinned of other steps",
        "observe/bounded_log.py",
        "self._rewrite(lambda step: step % self.stride == 0)",
        "self._rewrite(lambda step: step % self.stride != 0)",
        "observe/test_bounded_log.py",
    ),
    bug(
        "waits are part of the work",
        "page/step_view.py",
        "sum(s.end - s.start - s.wait for s in self.by_rank[rank]) / length)",
        "sum(s.end - s.start for s in self.by_rank[rank]) / length)",
        "page/test_step_view.py",
    ),
    bug(
        "the slowest rank is another",
        "observe/stragglers.py",
        "units, rank = divmod(int(metrics.pop(BUSIEST)), MAX_RANKS)",
        "units, rank = divmod(int(metrics.pop(BUSIEST)) + 1, MAX_RANKS)",
        "distributed/test_stragglers.py",
    ),
    # The simulator.
    bug(
        "the simulated Adam has no moments",
        "simulate/memory.py",
        "_TRAINED = 16",
        "_TRAINED = 8",
        "simulation/test_memory.py",
    ),
    bug(
        "a prompt is simulated for each response",
        "simulate/compute.py",
        "np.ceil(held / work.repeat)",
        "held",
        "simulation/test_compute.py",
    ),
    bug(
        "epochs are not in the wait",
        "simulate/compute.py",
        "waiting = epochs * float(busy.max(axis=0).sum())",
        "waiting = float(busy.max(axis=0).sum())",
        "simulation/test_compute.py",
    ),
    bug(
        "a simulated link has twice its rate",
        "simulate/network.py",
        "rate = link.rate * scale",
        "rate = 2 * link.rate * scale",
        "simulation/test_network.py",
        "simulation/test_simulate.py",
    ),
]


class Tree:
    """A copy of the files of the repository in which bugs are planted; tests in it import its own package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
        for compiled in (ROOT / SOURCE).rglob("__pycache__/*.nb[ic]"):  # kernels, which take minutes
            (folder / compiled.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy2(compiled, folder / compiled.relative_to(ROOT))
        found = self._python("-c", "import distflow; print(distflow.__file__)").stdout.strip()
        if not found.startswith(str(folder)):
            raise RuntimeError(f"tests in {folder} would import {found}")

    def _python(self, *words: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def run(self, test: str) -> str | None:
        """Runs tests until one fails; returns which, or how it ended, None if all have passed."""
        load = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        words = ["-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", test]
        try:
            done = self._python(*words, limit_s=TEST_LIMIT_S * load)
        except subprocess.TimeoutExpired:
            return f"{test}: did not end"
        if done.returncode == 0:
            return None
        if done.returncode in (1, 2):  # failed, or could not even be imported
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            return failed[0].split(" - ")[0].partition(" ")[2] if failed else f"{test}: ended by an error"
        raise RuntimeError(f"{test}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutations.json")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    bugs = [b for b in BUGS if not options.only or any(w in b.name or w in b.file for w in options.only)]
    stale = [b.name for b in bugs if (ROOT / SOURCE / b.file).read_text().count(b.text) != 1]
    if options.list or options.check:
        for b in bugs if options.list else [b for b in bugs if b.name in stale]:
            print(f"{b.file}: {b.name}")
        return int(bool(stale))
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Tree(Path(folder))
        for b, entry in _plant(tree, [b for b in bugs if b.name not in stale], results):
            results[b.key] = entry
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(results, indent=1))
            said = f"killed by {entry['killed_by']}" if entry["killed_by"] else "SURVIVED"
            print(f"{entry['seconds']:6.1f} s  {b.file}: {b.name}: {said}", flush=True)
            if time.monotonic() - start > 60 * options.minutes:
                break
    known = {b.name: results[b.key] for b in bugs if b.key in results}
    survived = [name for name, entry in known.items() if not entry["killed_by"]]
    rate = 1 - len(survived) / len(known) if known else 0.0
    report = {
        "bugs": len(bugs),
        "planted": len(known),
        "killed": len(known) - len(survived),
        "kill_rate": round(rate, 4),
        "goal": GOAL,
        "survived": survived,
        "cannot_be_planted": stale,
        "rooms": len({b.file.partition("/")[0] for b in bugs if b.name in known}),
        "seconds": round(sum(entry["seconds"] for entry in known.values())),
    }
    print(json.dumps(report))
    return int(bool(survived or stale))


def _plant(tree: Tree, bugs: list[Bug], results: dict[str, Any]) -> Iterator[tuple[Bug, dict[str, Any]]]:
    """Plants each bug that has no result yet, and runs its tests."""
    sound: set[str] = set(results.setdefault("sound", []))  # tests that pass in the tree as it is
    for b in bugs:
        if b.key in results:
            continue
        start, killed_by = time.monotonic(), None
        for test in b.tests:
            with b.planted(tree.folder):
                killed_by = tree.run(test)
            if killed_by is None:
                continue
            if killed_by not in sound and (broken := tree.run(_whole(killed_by, test))):
                raise RuntimeError(f"{broken} fails without any bug; mend it first")
            sound.add(killed_by)
            results["sound"] = sorted(sound)
            break
        yield b, {"name": b.name, "killed_by": killed_by, "seconds": round(time.monotonic() - start, 1)}


def _whole(killed_by: str, test: str) -> str:
    """Returns the test to run without the bug: the one that failed, or all if it is not known which."""
    return killed_by if killed_by.startswith("tests/") and ": " not in killed_by else test


if __name__ == "__main__":
    sys.exit(main())
