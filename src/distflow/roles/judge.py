"""A judge: a language model that scores responses or whole conversations.

Imports no torch: flows are planned without it. It is a role like any other:
`roles: {reward: {call: distflow.roles.judge:Judge, args: {…}}}`.
"""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from distflow.errors import ConfigError, DataError, NodeError, cut, shown, suggest
from distflow.flow import node
from distflow.plan.layout import Layout, format_ranks
from distflow.roles.context import RoleContext

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_RETRIES, _RETRY_S = 3, 1.0
_REPLY = 1 << 20  # bytes of an answer of an endpoint, at most
Verdict = str | Exception  # what the judge wrote, or why it did not


class Judge:
    """Asks a model `question` about each sample, and scores with the first number of its answer.

    `question` is a text with columns in braces, such as `{prompt}`, `{response}`, `{answer}` or `{conversation}`. The
    number is expected in `range`, which becomes a score from 0 to 1. The model is one of:

    - `base_url` and `name`: any endpoint that speaks OpenAI's API; the key is in the variable `api_key_env`,
    - `model: actor`, or another role that generates: its own engine, with the weights that the step's samples are from,
    - `model`: a model section as in a config, generated from by a second engine of the worker, a built-in one,
    - neither: the model of the config as it was before training, the same way.
    """

    def __init__(
        self,
        role: RoleContext,
        question: str,
        model: Mapping[str, Any] | str | None = None,
        base_url: str | None = None,
        name: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        range: Sequence[float] = (0, 10),
        max_tokens: int = 16,
        concurrent: int = 16,
        time_limit_s: float = 60.0,
        on_failure: Literal["error"] | float = 0.0,
    ) -> None:
        self.where = f"role '{role.name}' (the judge)"
        self.question, self.max_tokens = question, max_tokens
        self.columns = [field for _, field, _, _ in Formatter().parse(question) if field is not None]
        if not self.columns or not all(c.isidentifier() for c in self.columns):
            raise ConfigError(f"{self.where}: `question` names columns in braces, such as {{prompt}} and {{response}}")
        if len(range) != 2 or not range[0] < range[1]:
            raise ConfigError(f"{self.where}: `range` is {shown(range)}; it is the least and the highest number")
        if (base_url is None) != (name is None) or (base_url and model):
            raise ConfigError(f"{self.where}: give `base_url` and `name` of a model there, or `model`, or none of them")
        self.least, self.most = range
        self.on_failure = on_failure
        self.endpoint = (
            _Endpoint(base_url, name, api_key_env, max_tokens, concurrent, time_limit_s) if base_url else None
        )
        self.engine: Any = None
        layout = role.layout("score")
        if self.endpoint and layout is not None and layout.tp > 1:
            raise ConfigError(f"placement: {self.where} asks an endpoint, once for each sample; give it tp: 1")
        if self.endpoint or layout is None or role.rank not in layout.ranks:
            return
        from distflow.roles.judge_engine import borrowed_engine, frozen_engine

        if isinstance(model, str) and model in role.generates:
            self._check_place(role, layout, model)
            self.engine = borrowed_engine(role.roles[model].policy, max_tokens)
        else:
            self.engine = frozen_engine(role, layout, model, max_tokens)

    def _check_place(self, role: RoleContext, layout: Layout, generator: str) -> None:
        """Raises unless the judge is where the role generates whose engine it asks."""
        other = role.generates[generator]
        if layout != other:
            raise ConfigError(
                f"placement: {self.where} asks the engine of '{generator}', which is {other} on ranks"
                f" {format_ranks(other.ranks)}, and itself is {layout} on {format_ranks(layout.ranks)}; give"
                f" placement.roles.{role.name} the place of {generator}.generate"
            )
        if not hasattr(role.roles[generator], "policy"):
            raise ConfigError(f"{self.where}: '{generator}' is none of the built-in actors; it has no engine to ask")

    @node(
        type="inference",
        writes=["score"],
        ignores=("prompt_tokens", "rollout_logprobs", "response_mask", "turn_rewards", "finished", "weight_version"),
    )
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        """Scores with what the judge says of each sample."""
        import torch

        self.check_fields(batch.columns)
        questions = [self.ask_about({c: batch[c][i] for c in self.columns}) for i in range(len(batch))]
        asked = self.endpoint or self.engine
        assert asked is not None
        verdicts = asked.answers(questions)
        if verdicts and all(isinstance(v, Exception) for v in verdicts):
            raise NodeError(f"{self.where}: none of {len(verdicts)} questions was answered; the first: {verdicts[0]}")
        read = [self._read(int(i), v) for i, v in zip(batch.ids, verdicts, strict=True)]
        score = torch.tensor([self.on_failure if s is None else s for s in read], dtype=torch.float32)
        ctx.record.sample(batch.ids, {"verdict": [str(v) for v in verdicts]})
        if len(batch):
            ctx.metrics.log("judge/unread", read.count(None), reduce="sum")
            ctx.metrics.log("reward/mean", float(score.mean()), len(batch))
            ctx.metrics.log("reward/min", float(score.min()), reduce="min")
            ctx.metrics.log("reward/max", float(score.max()), reduce="max")
        return score

    def check_fields(self, fields: Iterable[str], where: str = "") -> None:
        """Raises if the question names a column that samples do not have."""
        known = list(fields)
        for column in self.columns:
            if column not in known:
                raise ConfigError(f"{where}{self.where}: there is no column '{column}'{suggest(column, known)}")

    def ask_about(self, row: Mapping[str, Any]) -> str:
        """Returns the question about one sample."""
        return self.question.format_map({name: _text(value) for name, value in row.items()})

    def read(self, verdict: str) -> float | None:
        """Returns the score that a verdict gives, None if it has no number in the range."""
        number = _NUMBER.search(verdict.rpartition("</think>")[2])
        value = float(number[0]) if number else None
        if value is None or not self.least <= value <= self.most:
            return None
        return (value - self.least) / (self.most - self.least)

    def _read(self, sample: int, verdict: Verdict) -> float | None:
        score = None if isinstance(verdict, Exception) else self.read(verdict)
        if score is None and self.on_failure == "error":
            raise NodeError(
                f"{self.where}: sample {sample} got no number from {self.least:g} to {self.most:g}, but"
                f" {shown(verdict)}; ask another question, or set `on_failure: 0.0` to give such samples that score"
            )
        return score


class _Endpoint:
    """Somebody else's server."""

    def __init__(
        self, base_url: str, name: str | None, api_key_env: str, max_tokens: int, concurrent: int, time_limit_s: float
    ) -> None:
        self.url, self.name = f"{base_url.rstrip('/')}/chat/completions", name
        self.key, self.max_tokens = os.environ.get(api_key_env, ""), max_tokens
        self.concurrent, self.time_limit_s = concurrent, time_limit_s

    def answers(self, questions: Sequence[str]) -> list[Verdict]:
        with ThreadPoolExecutor(self.concurrent, "judge") as pool:
            return list(pool.map(self._answer, questions))

    def _answer(self, question: str) -> Verdict:
        """Asks, and asks again if the server is overloaded or gone for a moment."""
        error: Exception = DataError("never asked")
        for attempt in range(_RETRIES):
            try:
                return self._ask(question)
            except urllib.error.HTTPError as e:
                error = DataError(f"{self.url} answered {e.code}: {cut(e.read(300).decode(errors='replace'), 200)}")
                if e.code != 429 and e.code < 500:
                    break
            except OSError as e:
                error = DataError(f"{self.url} cannot be reached: {e}")
            except (ValueError, KeyError, IndexError, TypeError) as e:
                error = DataError(f"{self.url} gave an answer that is none of the chat API: {shown(e)}")
                break
            time.sleep(_RETRY_S * attempt)
        return error

    def _ask(self, question: str) -> str:
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.time_limit_s) as answer:
            return str(json.loads(answer.read(_REPLY))["choices"][0]["message"]["content"] or "")


def _text(value: Any) -> str:
    """Returns a column of a sample as text; messages as lines that begin with their roles."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return "\n".join(f"{m['role']}: {_said(m)}" for m in value)
    return value if isinstance(value, str) else str(value.item() if hasattr(value, "item") else value)


def _said(message: Mapping[str, Any]) -> str:
    calls = [c.get("function", c) for c in message.get("tool_calls") or []]
    made = [f"{c.get('name')}({json.dumps(c.get('arguments'), ensure_ascii=False)})" for c in calls]
    return " ".join([str(message.get("content") or ""), *made]).strip()
