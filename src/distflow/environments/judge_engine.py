"""The model of a judge in the worker itself: a built-in rollout engine whose weights nobody trains."""

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.config.schema import ModelConfig
from distflow.engine.model.source import DTYPES, open_model
from distflow.engine.model.text import Text, prompt_limit
from distflow.engine.role_context import RoleContext
from distflow.engine.rollout.builtin import BuiltinEngine
from distflow.engine.rollout.engine import Request, SamplingParams
from distflow.engine.rollout.responses import complete
from distflow.errors import DataError
from distflow.plan.layout import Layout


class JudgeEngine:
    """Answers questions greedily, all of a step at once."""

    def __init__(
        self, role: RoleContext, layout: Layout, model: Mapping[str, Any] | str | None, max_tokens: int
    ) -> None:
        given = ModelConfig(path=model) if isinstance(model, str) else ModelConfig(**model) if model else None
        source = open_model(given, lambda: iter(()), role.base, role.seed) if given else role.model
        self.text = Text(source, prompt_limit(source, max_tokens, None))
        dtype, mesh = DTYPES[role.train.dtype], role.meshes[layout]
        self.engine = BuiltinEngine(source, layout, mesh, role.rank, role.rollout, dtype, role.device)
        self.engine.read_weights(source)
        self.engine.commit_weights(0)
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
        for i, completion in complete(self.engine, requests).items():
            verdicts[i] = str(self.text.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True))
        self.engine.release_memory(weights=False)
        return [verdicts[i] for i in range(len(questions))]
