"""The actor of a run with environments: it has conversations instead of single responses.

Imports no torch: flows are planned without it.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.agents.choice import choose_environments, group_seed
from distflow.agents.setup_check import COLUMN, check_columns, check_rows, start_env_pool
from distflow.agents.spec import EnvironmentSetupError
from distflow.config.schema import EnvironmentConfig
from distflow.flow.trace import node
from distflow.plan.field_bytes import IMAGES, PROMPT_IMAGES, RESPONSE_IMAGES
from distflow.roles.actor import ROLLOUT, Actor
from distflow.roles.context import RoleContext
from distflow.roles.role import Role
from distflow.roles.trained import HISTORY
from distflow.util.patient_files import SharedLog
from distflow.util.seeds import eval_seed

if TYPE_CHECKING:
    from distflow.agents.conversation import Sample
    from distflow.agents.conversations import Begun, Conversations
    from distflow.agents.endpoint import Endpoint
    from distflow.agents.env_pool import EnvPool
    from distflow.agents.record import ConversationRecord
    from distflow.agents.runtime import EnvironmentRuntime
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context
    from distflow.dataset.view import DatasetView

CONVERSATION = (
    *ROLLOUT,
    *HISTORY,
    "turn_rewards",
    "env_reward",
    "conversation",
    "histories",
    "environment_name",
)

SEEN = (*CONVERSATION, PROMPT_IMAGES, RESPONSE_IMAGES)
_BEGUN = "begun"  # the column of conversations of later steps

logger = logging.getLogger(__name__)


class Environment(Role):
    """Stands for the environments of a config where a flow has them as a role: `actor.converse(prompts, environment)`.

    `name`: one of them; without it, the row's column `environment` or the ratios decide.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name


class Agent(Actor):
    """`environments`: name → section of the config. Failed conversations are appended to the file `log`."""

    def __init__(
        self, role: RoleContext, environments: Mapping[str, Mapping[str, Any]], log: Path | None = None
    ) -> None:
        self.environments = {name: EnvironmentConfig.model_validate(e) for name, e in environments.items()}
        self.log = SharedLog(log) if log else None
        self.env_pool: EnvPool | None = None  # where conversations are led
        self.endpoint: Endpoint | None = None  # if an agent needs one
        self._runtimes: list[EnvironmentRuntime] = []
        self._begun: Mapping[int, Begun] = {}  # by sample id: conversations of later steps
        layout = role.layout("generate", "converse")
        if layout and any(replica[0] == role.rank for replica in layout.replicas):
            self.env_pool = start_env_pool(self.environments, role.base)  # they import while models load
        super().__init__(role)

    @node(type="inference", writes=CONVERSATION, generates=True, whole_rows=True)
    def generate(
        self, batch: "Batch", ctx: "Context", temperature: float | None = None, held_out: bool = False
    ) -> dict[str, Any]:
        """Has a conversation about each row; `prompt` is its beginning."""
        return self._converse(batch, ctx, temperature, held_out, None)

    @node(type="inference", writes=CONVERSATION, generates=True, whole_rows=True)
    def converse(
        self,
        batch: "Batch",
        ctx: "Context",
        environment: str | None = None,
        temperature: float | None = None,
        held_out: bool = False,
    ) -> dict[str, Any]:
        """Does the same with one of several environments; by default rows or ratios choose them."""
        return self._converse(batch, ctx, temperature, held_out, environment)

    def check_fields(self, fields: Iterable[str], where: str = "") -> None:
        """Loads the environments, and raises if one needs a column that its rows do not have."""
        fields = list(fields)
        if self.env_pool is None or "prompt" not in fields:  # of a node that has no conversations
            return
        check_columns(list(self.environments), self.env_pool.describe(), fields, where)
        self._prepare()

    def check_rows(self, rows: "DatasetView", rank: int, workers: int) -> None:
        """Raises if a row names an environment that there is not."""
        if self.env_pool is not None:
            check_rows(list(self.environments), self.env_pool.describe(), rows, rank, workers)

    def close(self) -> None:
        if self.env_pool is not None:
            self.env_pool.close()
        if self.endpoint is not None:
            self.endpoint.stop()

    def _prepare(self) -> None:
        """Makes the runtimes that conversations share, one per environment, once the environments are loaded."""
        if self._runtimes or self.env_pool is None:
            return
        from distflow.agents.runtime import make_runtimes

        rollout, text, descriptions = self.role.rollout, self.policy.text, self.env_pool.describe()
        self._runtimes = make_runtimes(self.environments, descriptions, text, rollout.max_tokens)
        if any(r.needs_endpoint for r in self._runtimes):
            from distflow.agents.endpoint import Endpoint

            host = next(iter(self.environments.values())).endpoint_host  # all have the same
            self.endpoint = Endpoint(text.name, len(text.tokenizer), host=host)

    def _converse(
        self, batch: "Batch", ctx: "Context", temperature: float | None, held_out: bool, environment: str | None
    ) -> dict[str, Any]:
        from distflow.agents.converse import ReplicaGroup, converse
        from distflow.agents.record import columns, log_conversations
        from distflow.rollout.engine_load import EngineLoad

        self._prepare()
        policy = self.policy
        assert policy.engine is not None
        conversations = self._conversations(batch, ctx, temperature, held_out, environment)
        ended: dict[int, ConversationRecord] = {}
        load, ids = EngineLoad(), [int(i) for i in batch.ids]
        waiting = {i: [ids[k] for k in places] for i, places in enumerate(ctx.chunks.parts)} if ctx.chunks else {}

        def on_ended(records: list["ConversationRecord"]) -> list["ConversationRecord"]:
            records = [self._check_failure(r, ctx) for r in records]
            ended.update((r.sample_id, r) for r in records)
            load.add(len(batch) - len(ended))
            for i in [i for i, part in waiting.items() if ended.keys() >= set(part)]:
                assert ctx.chunks is not None
                ctx.chunks.leave(i, columns([ended[k] for k in waiting.pop(i)], policy.text))
            return records

        longest = policy.text.limit + policy.sampling.max_tokens
        concurrent = sum(e.concurrent for e in self.environments.values())
        with ctx.record.call("engine") as details:
            load.add(len(batch))
            replica = self._replica(ReplicaGroup, ctx)
            records, use = converse(policy.engine, conversations, ids, longest, concurrent, replica, on_ended)
            details["left"] = load.points()
        policy.release_engine_memory()
        ordered = [records[i] for i in ids]
        rollout = columns(ordered, policy.text)
        tokens = self._log_rollout(rollout, ctx, held_out)
        if ctx.partial and tokens:
            ctx.metrics.log("rollout/carried_frac", _carried_tokens(ctx.partial.begun, set(ids)) / tokens, tokens)
        if conversations and not held_out:
            self._carry(conversations, ctx)
        log_conversations(ordered, ctx.metrics, "val/" if held_out else "")
        if ordered and not held_out:
            ctx.metrics.log("rollout/engine_busy", use.busy)
            ctx.metrics.log("rollout/reused", use.reused)
        return rollout

    def _conversations(
        self, batch: "Batch", ctx: "Context", temperature: float | None, held_out: bool, environment: str | None
    ) -> "Conversations | None":
        """Makes the conversations of a step, and of later steps as far as these may begin; None without processes."""
        from distflow.agents.conversations import Ahead, Begun, Conversations

        if self.env_pool is None:
            return None
        params, seed = self._sampling(temperature), eval_seed(ctx.seed) if held_out else ctx.seed
        samples = self._samples(batch, ctx, seed, environment)
        state = {"global_step": ctx.step if ctx.held_out else ctx.step - 1, "max_steps": ctx.steps}
        where = self._runtimes, self.env_pool, params, seed, self.policy.weight_version, self.endpoint, state
        if held_out:
            return Conversations(samples, *where)
        warm = max(r.warm for r in self._runtimes)
        later = ctx.partial.ahead if ctx.partial else ctx.upcoming(warm) if warm and ctx.upcoming else None
        ahead = Ahead(self._samples(later, ctx, seed, environment) if later is not None else (), bool(ctx.partial))
        begun, self._begun = self._begun, {}
        if ctx.partial and ctx.partial.begun is not None and not begun:  # a resumed run
            batch = ctx.partial.begun
            begun = {i: Begun.of(fields) for i, fields in zip(batch.ids.tolist(), batch[_BEGUN], strict=True)}
        wanted = {s.id for s in (*samples, *ahead.samples)}
        return Conversations(samples, *where, ahead, {i: b for i, b in begun.items() if i in wanted})

    def _carry(self, conversations: "Conversations", ctx: "Context") -> None:
        """Keeps what was begun for the next step, and in checkpoints what its models have said."""
        self._begun = conversations.begun
        if ctx.partial:
            ahead = ctx.partial.ahead
            told = {i: b for i, b in self._begun.items() if b.turns or b.record}
            places = [k for k, i in enumerate(ahead.ids.tolist()) if i in told]
            column = [told[i].as_json() for i in ahead.ids[places].tolist()]
            ctx.partial.carry(type(ahead)(ahead.ids[places], ahead.groups[places], {_BEGUN: column}))

    def _replica(self, make: Any, ctx: "Context") -> Any:
        layout = ctx.layout
        if layout.tp == 1:
            return make()
        first = layout.replicas[layout.replica_of(ctx.rank) or 0][0]
        return make(self.role.mesh(layout).get_group("tp"), first, self.role.device)

    def _samples(self, batch: "Batch", ctx: "Context", seed: int, environment: str | None) -> list["Sample"]:
        from distflow.agents.conversation import Sample

        names = list(self.environments)
        rows: list[dict[str, Any]] = [
            {name: _plain(column[i]) for name, column in batch.columns.items()} for i in range(len(batch))
        ]
        if environment in names:
            chosen = [names.index(environment)] * len(rows)
        else:
            named = [r.get(COLUMN) for r in rows] if len(names) > 1 and rows and COLUMN in rows[0] else None
            ratios = [e.ratio for e in self.environments.values()]
            chosen = choose_environments(names, ratios, batch.groups, seed, named)
        first, count = int(ctx.groups[0]), len(ctx.groups)
        return [
            Sample(
                int(sample),
                index,
                row["prompt"],
                row,
                group_seed(seed, int(group)),
                (int(group) - first) // count,
                ctx.held_out,
                row.get(IMAGES) or (),
            )
            for sample, group, row, index in zip(batch.ids, batch.groups, rows, chosen, strict=True)
        ]

    def _check_failure(self, record: "ConversationRecord", ctx: "Context") -> "ConversationRecord":
        """Gives a failed conversation its score, or ends the run; it is named in the log and by a warning."""
        if record.failure is None:
            return record
        on_failure = self.environments[record.environment].on_failure
        line = f"sample {record.sample_id}: environment '{record.environment}' {record.failure}"
        if on_failure == "error":
            raise EnvironmentSetupError(
                f"{line}; fix it, or set `environment.on_failure: 0.0` to give such samples that score"
            )
        if ctx.is_dp_leader:
            logger.warning("step %d: %s; its score is %g", ctx.step, line, on_failure)
            if self.log is not None:
                self.log.append([f"step {ctx.step}: {line}"])
        return replace(record, reward=float(on_failure), turn_rewards=[0.0] * len(record.tokens))


class SeeingAgent(Agent):
    """The actor of a config with environments whose model reads images: conversations have some."""

    @node(type="inference", writes=SEEN, generates=True, whole_rows=True)
    def generate(
        self, batch: "Batch", ctx: "Context", temperature: float | None = None, held_out: bool = False
    ) -> dict[str, Any]:
        return super().generate(batch, ctx, temperature, held_out)  # type: ignore[no-any-return]

    @node(type="inference", writes=SEEN, generates=True, whole_rows=True)
    def converse(
        self,
        batch: "Batch",
        ctx: "Context",
        environment: str | None = None,
        temperature: float | None = None,
        held_out: bool = False,
    ) -> dict[str, Any]:
        return super().converse(batch, ctx, environment, temperature, held_out)  # type: ignore[no-any-return]


def _carried_tokens(begun: "Batch | None", ids: set[int]) -> int:
    """Returns how many tokens of these samples were sampled in earlier steps."""
    if begun is None:
        return 0
    told = [b for i, b in zip(begun.ids.tolist(), begun[_BEGUN], strict=True) if i in ids]
    return sum(len(turn["tokens"]) for b in told for turn in b["turns"])


def _plain(value: Any) -> Any:
    """Returns a value of a row as JSON can have it."""
    return value.tolist() if hasattr(value, "tolist") else value
