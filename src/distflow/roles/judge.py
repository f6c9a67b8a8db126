"""A judge: a language model that scores responses or whole conversations.

Imports no torch: flows are planned without it. It is a role like any other:
`roles: {reward: {call: judge, args: {…}}}`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from distflow.batch.scores import NOT_SCORED, log_scores
from distflow.errors import ConfigError, NodeError, shown, suggest
from distflow.flow import node
from distflow.plan.layout import Layout, format_ranks
from distflow.roles.actor import Actor
from distflow.roles.context import RoleContext
from distflow.roles.judge_endpoint import ChatClient
from distflow.roles.role import Role

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context
    from distflow.roles.judge_engine import JudgeEngine

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class JudgeOptions:
    """The question for a judge, and the model that answers: see `Judge`."""

    question: str
    model: Mapping[str, Any] | str | None = None
    base_url: str | None = None
    name: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    range: Sequence[float] = (0, 10)
    max_tokens: int = 16
    concurrent: int = 16  # requests to an endpoint at the same time
    time_limit_s: float = 60.0
    on_failure: Literal["error"] | float = 0.0

    @property
    def columns(self) -> list[str]:
        """Returns the columns that the question names."""
        return [field for _, field, _, _ in Formatter().parse(self.question) if field is not None]

    def check(self, where: str) -> None:
        """Raises unless the options fit together; `where` begins the error."""
        if not self.columns or not all(c.isidentifier() for c in self.columns):
            raise ConfigError(f"{where}: `question` names columns in braces, such as {{prompt}} and {{response}}")
        if len(self.range) != 2 or not self.range[0] < self.range[1]:
            raise ConfigError(f"{where}: `range` is {shown(self.range)}; it is the least and the highest number")
        if (self.base_url is None) != (self.name is None) or (self.base_url and self.model):
            raise ConfigError(f"{where}: give `base_url` and `name` of a model there, or `model`, or none of them")

    def endpoint(self) -> "ChatClient | None":
        """Returns the endpoint that is asked, if it is one."""
        if self.base_url is None or self.name is None:
            return None
        return ChatClient(
            self.base_url, self.name, self.api_key_env, self.concurrent, self.time_limit_s, self.max_tokens
        )


class Judge(Role):
    """Asks a model `question` about each sample, and scores with the first number of its answer.

    `question` is a text with columns in braces, such as `{prompt}`, `{response}`, `{answer}` or `{conversation}`. The
    number is expected in `range`, which becomes a score from 0 to 1. The model is one of:

    - `base_url` and `name`: any endpoint that speaks OpenAI's API; the key is in the variable `api_key_env`,
    - `model: actor`, or another role that generates: its own engine, with the weights that the step's samples are from,
    - `model`: a model section as in a config, generated from by a second engine of the worker, a built-in one,
    - neither: the model of the config as it was before training, the same way.
    """

    def __init__(self, role: RoleContext, question: str, **options: Any) -> None:
        """`options`: the other fields of `JudgeOptions`."""
        self.where = f"role '{role.name}' (the judge)"
        self.options = JudgeOptions(question, **options)
        self.options.check(self.where)
        layout, endpoint = role.layout("score"), self.options.endpoint()
        if endpoint and layout is not None and layout.tp > 1:
            raise ConfigError(f"placement: {self.where} asks an endpoint, once for each sample; give it tp: 1")
        self.model: ChatClient | JudgeEngine | None = endpoint
        if endpoint is None and layout is not None and role.rank in layout.ranks:
            self.model = self._engine(role, layout)

    def _engine(self, role: RoleContext, layout: Layout) -> "JudgeEngine":
        from distflow.roles.judge_engine import borrowed_engine, frozen_engine

        model, max_tokens = self.options.model, self.options.max_tokens
        if isinstance(model, str) and model in role.generates:
            return borrowed_engine(self._lender(role, layout, model).policy, max_tokens)
        return frozen_engine(role, layout, model, max_tokens)

    def _lender(self, role: RoleContext, layout: Layout, generator: str) -> Actor:
        """Returns the role whose engine the judge asks; raises unless the judge is where that generates."""
        other = role.generates[generator]
        if layout != other:
            raise ConfigError(
                f"placement: {self.where} asks the engine of '{generator}', which is {other} on ranks"
                f" {format_ranks(other.ranks)}, and itself is {layout} on {format_ranks(layout.ranks)}; give"
                f" placement.roles.{role.name} the place of {generator}.generate"
            )
        lender = role.roles[generator]
        if not isinstance(lender, Actor):
            raise ConfigError(f"{self.where}: '{generator}' is none of the built-in actors; it has no engine to ask")
        return lender

    @node(
        type="inference",
        writes=["score"],
        ignores=NOT_SCORED,
    )
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        """Scores with what the judge says of each sample."""
        import torch

        self.check_fields(batch.columns)
        columns, on_failure = self.options.columns, self.options.on_failure
        assert self.model is not None
        verdicts = self.model.answers([self.ask_about({c: batch[c][i] for c in columns}) for i in range(len(batch))])
        if verdicts and all(isinstance(v, Exception) for v in verdicts):
            raise NodeError(f"{self.where}: none of {len(verdicts)} questions was answered; the first: {verdicts[0]}")
        read = [self._read(int(i), v) for i, v in zip(batch.ids, verdicts, strict=True)]
        score = torch.tensor([on_failure if s is None else s for s in read], dtype=torch.float32)
        ctx.record.sample(batch.ids, {"verdict": [str(v) for v in verdicts]})
        if len(batch):
            ctx.metrics.log("judge/unread", read.count(None), reduce="sum")
        log_scores(ctx.metrics, score.tolist())
        return score

    def check_fields(self, fields: Iterable[str], where: str = "") -> None:
        known = list(fields)
        for column in self.options.columns:
            if column not in known:
                raise ConfigError(f"{where}{self.where}: there is no column '{column}'{suggest(column, known)}")

    def ask_about(self, row: Mapping[str, Any]) -> str:
        """Returns the question about one sample."""
        return self.options.question.format_map({name: _text(value) for name, value in row.items()})

    def read(self, verdict: str) -> float | None:
        """Returns the score that a verdict gives, None if it has no number in the range."""
        number = _NUMBER.search(verdict.rpartition("</think>")[2])
        value = float(number[0]) if number else None
        least, most = self.options.range
        return None if value is None or not least <= value <= most else (value - least) / (most - least)

    def _read(self, sample: int, verdict: str | Exception) -> float | None:
        score = None if isinstance(verdict, Exception) else self.read(verdict)
        if score is None and self.options.on_failure == "error":
            least, most = self.options.range
            raise NodeError(
                f"{self.where}: sample {sample} got no number from {least:g} to {most:g}, but"
                f" {shown(verdict)}; ask another question, or set `on_failure: 0.0` to give such samples that score"
            )
        return score


def _text(value: Any) -> str:
    """Returns a column of a sample as text; messages as lines that begin with their roles."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return "\n".join(f"{m['role']}: {_said(m)}" for m in value)
    return value if isinstance(value, str) else str(value.item() if hasattr(value, "item") else value)


def _said(message: Mapping[str, Any]) -> str:
    calls = [c.get("function", c) for c in message.get("tool_calls") or []]
    made = [f"{c.get('name')}({json.dumps(c.get('arguments'), ensure_ascii=False)})" for c in calls]
    return " ".join([str(message.get("content") or ""), *made]).strip()
