"""The model of a judge in the worker itself: in the engine that the run generates with, or in one of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.config.schema import ModelConfig
from distflow.errors import DataError
from distflow.model.source import DTYPES, Source, open_model
from distflow.model.text import Text, prompt_limit
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext
from distflow.roles.policy import Policy
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import EngineSetup, Request, RolloutEngine, SamplingParams
from distflow.rollout.responses import complete


class JudgeEngine:
    """Answers questions greedily, all of a step at once. `longest`: tokens of a question, at most.

    The engine is that of `lender`, a policy, or one of its own with weights that are not trained.
    """

    def __init__(
        self, engine: RolloutEngine, source: Source, longest: int, max_tokens: int, lender: Policy | None = None
    ) -> None:
        self.engine, self.lender = engine, lender
        self.text = Text(source, longest)
        self.params = SamplingParams(max_tokens, temperature=0.0, stop=self.text.stop_tokens(source, ()))

    def answers(self, questions: Sequence[str]) -> list[str | Exception]:
        verdicts: dict[int, str | Exception] = {}
        requests = []
        for i, question in enumerate(questions):
            try:
                chat = [{"role": "user", "content": question}]
                prompt = self.text.encode(chat if self.text.tokenizer.chat_template else question)
                requests.append(Request(i, tuple(prompt), self.params, 0))
            except DataError as e:  # a conversation that is too long to judge
                verdicts[i] = e

        version = self.lender.weight_version if self.lender else 0
        for i, completion in complete(self.engine, requests, version).items():
            verdicts[i] = str(self.text.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True))
        if self.lender:
            self.lender.return_engine()
        else:
            self.engine.release_memory(weights=False)
        return [verdicts[i] for i in range(len(questions))]


def frozen_engine(
    role: RoleContext, layout: Layout, model: Mapping[str, Any] | str | None, max_tokens: int
) -> JudgeEngine:
    """Makes an engine with untrained weights: of `model`, or of the run's model as it was at the start."""
    given = ModelConfig(path=model) if isinstance(model, str) else ModelConfig(**model) if model else None
    source = open_model(given, lambda: iter(()), role.base, role.seed) if given else role.model
    limit = prompt_limit(source, max_tokens, None)
    where, dtype = (layout, role.mesh(layout), role.rank), DTYPES[role.train.dtype]
    engine = BuiltinEngine(EngineSetup(source, *where, role.rollout, dtype, role.device, limit + max_tokens))
    engine.read_weights(source)
    engine.commit_weights(0)
    return JudgeEngine(engine, source, limit, max_tokens)


def borrowed_engine(policy: Policy, max_tokens: int) -> JudgeEngine:
    """Judges with the engine of a role that generates, and so with the weights that the step's samples are from."""
    engine, longest = policy.lend_engine(), policy.longest_prompt(max_tokens)
    return JudgeEngine(engine, policy.role.model, longest, max_tokens, policy)
