"""A rollout engine of another package, in one file: one request after the other, all tokens in every pass."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from distflow.errors import ConfigError
from distflow.model.attention import PackedAttention
from distflow.model.tensor_parallel import parameter_specs, tp_styles
from distflow.rollout.engine import Completion, EngineSetup, Request, RolloutEngine, Wake, never
from distflow.rollout.sampling import sample


class ToyEngine(RolloutEngine):
    @classmethod
    def check(cls, source, config, device, lora) -> None:
        if config.top_k == 13:
            raise ConfigError("rollout.top_k: the toy engine is superstitious; choose another number")

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.model, self.longest = setup.source.skeleton(), setup.longest
        self.weight_specs = parameter_specs(self.model, tp_styles(self.model, 1, "here"))
        self.weights = {s.name: torch.full(s.shape, torch.nan) for s in self.weight_specs}
        self.requests: list[Request] = []

    def weight_targets(self) -> Mapping[str, Tensor]:
        return self.weights

    def held_weights(self) -> Mapping[str, Tensor]:
        return self.weights

    def add_request(self, request: Request) -> None:
        self.requests.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def abort(self, request_ids: Iterable[int]) -> None:
        dropped = set(request_ids)
        self.requests = [r for r in self.requests if r.id not in dropped]

    @torch.inference_mode()
    def step(self, wake: Wake = never) -> list[Completion]:
        request = self.requests.pop()
        ids, tokens, logprobs = np.array([request.sample_id]), list[int](), list[float]()
        while len(tokens) < request.room and not (tokens and tokens[-1] in request.params.stop):
            position = np.array([request.position + len(tokens)])
            token, logprob = sample(
                self._logits([*request.prompt, *tokens]), request.params, request.seed, ids, position
            )
            tokens.append(int(token))
            logprobs.append(float(logprob))
        finished = tokens[-1] in request.params.stop
        arrays = np.array(tokens), np.array(logprobs, np.float32)
        return [Completion(request.sample_id, *arrays, finished, self.weight_version, request.id)]

    def _logits(self, tokens: list[int]) -> Tensor:
        inputs = {
            "input_ids": torch.tensor([tokens]),
            "position_ids": torch.arange(len(tokens))[None],
            "use_cache": False,
            "distflow": PackedAttention([len(tokens)]),
        }
        out = torch.func.functional_call(self.model, self.weights, kwargs=inputs)
        logits: Tensor = out.logits[0, -1:]
        return logits


class ForgetfulEngine(ToyEngine):
    """Computes with the first weights for ever."""

    def weight_targets(self) -> Mapping[str, Tensor]:
        if self.weight_version < 0:
            return self.weights
        return {name: t.clone() for name, t in self.weights.items()}
