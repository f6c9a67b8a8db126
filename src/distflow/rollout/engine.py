"""The interface of a rollout engine: weights in, requests in, completions out as they finish, memory given back.

An engine is one class, which a package brings under a name by an entry point of the group `distflow.engines`. Text,
groups, rewards and exactly-once accounting are outside of it. Every rank of a generation layout has one engine;
tensor-parallel ranks make the same calls in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.config.schema import LoraConfig, RolloutConfig
from distflow.errors import ConfigError, WeightsError, cut
from distflow.model.images import Images
from distflow.model.source import Source
from distflow.plan.layout import Layout
from distflow.rollout.registry import engines
from distflow.util.arrays import Ints
from distflow.util.plugins import load_plugin
from distflow.weights.shards import Shards, TensorSpec, slices


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, and of when a response ends."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest one's
    repetition_penalty: float = 1.0  # of tokens that are in the prompt or the response already; 1: none
    min_tokens: int = 0  # no stop token before this many
    stop: frozenset[int] = frozenset()  # token ids; the response includes the one it ends with

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @cached_property
    def next_token(self) -> "SamplingParams":
        """Returns the parameters that decide on the next token: requests with equal ones are sampled together."""
        return replace(self, max_tokens=0)


Wake = Callable[[], bool]


def never() -> bool:
    """Serves as `wake` of a caller that waits for completions alone."""
    return False


@dataclass(frozen=True)
class Request:
    """One response to generate, or one turn of the model in a conversation.

    Its sampling noise is a function of (seed, sample id, position in the response).
    """

    sample_id: int
    prompt: tuple[int, ...]  # token ids as the model reads them; same ones with the same images are prefilled once
    params: SamplingParams
    seed: int
    position: int = 0  # in the response, of the first token to generate; above 0 if `prompt` ends with its beginning
    max_tokens: int | None = None  # to generate; by default the rest of `params.max_tokens`
    request_id: int = -1  # by default the sample id; a sample with several requests at once gives each its own
    priority: int = 0  # waiting requests with a lower one start first
    keep: bool = False  # the sample's next request begins as this one and its response do; `forget` ends that
    images: tuple[str, ...] = ()  # references, in the order of their tokens in the prompt

    @property
    def id(self) -> int:
        return self.sample_id if self.request_id < 0 else self.request_id

    @property
    def shared(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Returns what requests that are prefilled together have in common: the prompt, with its images."""
        return self.prompt, self.images

    @property
    def room(self) -> int:
        """Tokens to generate, at most."""
        return self.params.max_tokens - self.position if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class Completion:
    """The response to a request, and the version of the weights it was generated with."""

    sample_id: int
    tokens: Ints  # int64
    logprobs: NDArray[np.float32]  # under the distribution before top-p and top-k, as a trainer computes them
    finished: bool  # by a stop token, not by the length limit
    weight_version: int
    request_id: int = -1  # of the request
    reused: int = 0  # tokens of the prompt that were not computed, because the sample's last request had been kept
    versions: Ints | None = None  # of each token's weights, if they are not all `weight_version`, the first one's
    experts: NDArray[np.integer] | None = None  # [tokens of prompt and response but the last, layers, top-k]

    @property
    def token_versions(self) -> Ints:
        return np.full(len(self.tokens), self.weight_version, np.int64) if self.versions is None else self.versions

    def check_version(self, version: int) -> None:
        """Raises unless it was generated with the weights that the plan wants."""
        if self.weight_version != version:
            raise WeightsError(
                f"the response of sample {self.sample_id} was generated with weights of version {self.weight_version},"
                f" and the plan says {version}: the engine has missed a weight sync"
            )


@dataclass(frozen=True)
class EngineSetup:
    """Everything that an engine is made from: the model, and this rank's place among the generating ones."""

    source: Source
    layout: Layout
    mesh: DeviceMesh  # of the layout, with the dimensions `dp` and `tp`
    rank: int
    config: RolloutConfig
    dtype: torch.dtype
    device: torch.device
    longest: int  # tokens of a prompt and its response, at most
    lora: LoraConfig | None = None  # the adapter that is trained
    images: Images | None = None  # of prompts, if the model reads images


class RolloutEngine(ABC):
    """One rank's part of an engine. Methods that are not abstract do what suits most engines."""

    interruptible: ClassVar[bool] = False  # has `interrupt`, which `rollout.partial` needs
    returns_experts: ClassVar[bool] = False  # that a mixture has chosen, which `rollout.router_replay` needs
    keeps_adapter: ClassVar[bool] = False  # apart from the weights, and synced alone; else it is merged into them

    weight_specs: Sequence[
        TensorSpec
    ]  # what a weight sync fills: `parameter_specs` of the model, as the trainer has them
    adapter_specs: Sequence[TensorSpec] = ()  # the matrices of an adapter that it keeps, filled like parameters
    weight_version = -1  # of the weights that the next token is generated with; at first there are none
    longest: int  # tokens of a prompt and its response, at most

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    @classmethod  # noqa: B027
    def check(cls, source: Source, config: RolloutConfig, device: torch.device, lora: LoraConfig | None) -> None:
        """Raises a `ConfigError` if it cannot work here: not installed, or another model, device or adapter.

        `distflow check` and every rank that generates call it before anything is loaded.
        """

    @classmethod
    def shards(cls, specs: Sequence[TensorSpec], layout: Layout) -> Shards:
        """Returns which part of each parameter a rank of the layout has. Ranks without an engine ask as well."""
        return Shards(layout, 1)

    @torch.no_grad()
    def read_weights(self, source: Source) -> None:
        """Fills the weights of a model that is not trained, from its source."""
        shards = self.shards(self.weight_specs, self.setup.layout)
        read, targets = source.reader({s.name: s.shape for s in self.weight_specs}), self.weight_targets()
        for spec in self.weight_specs:
            targets[spec.name].copy_(read(spec.name, slices(shards.box(spec, self.setup.rank))))

    def share_weights(self, tensors: Mapping[str, Tensor]) -> bool:
        """Uses a colocated trainer's very tensors as weights, so that an update is seen at once; False if it cannot."""
        return False

    @abstractmethod
    def weight_targets(self) -> Mapping[str, Tensor]:
        """Returns this rank's tensors for the next weights, allocated where they were released, to be filled."""

    @abstractmethod
    def held_weights(self) -> Mapping[str, Tensor]:
        """Returns the tensors that this rank computes with, wherever they came from, by the names of the specs."""

    def commit_weights(self, version: int) -> None:
        """Uses the new weights from now on: all targets are filled, and there are no unfinished requests."""
        self.weight_version = version

    @abstractmethod
    def add_request(self, request: Request) -> None: ...

    @property
    @abstractmethod
    def has_unfinished(self) -> bool: ...

    @abstractmethod
    def step(self, wake: Wake = never) -> list[Completion]:
        """Generates until at least one request is finished and returns all that are.

        It returns earlier, maybe with none, if `wake` is true, which is asked after every decoding step: the caller has
        more requests. Of a tensor-parallel replica the first rank's is asked, and all ranks give one, or none does.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[int]) -> None:
        """Drops requests, which have no completion then; ids of others, or of finished ones, are ignored."""

    def interrupt(self) -> list[Completion]:
        """Drops unfinished requests; returns what there is of their responses, which may be no token.

        How far each has come depends on the requests and what was generated, never on time.
        """
        raise NotImplementedError

    def forget(self, sample_ids: Iterable[int]) -> None:  # noqa: B027
        """Drops what is kept of samples; their requests are finished or aborted. Ids of others are ignored."""

    def serving(self, sequences: int, longest: int) -> AbstractContextManager[None]:
        """Stays ready inside of it, also while there are no requests, for so many of at most so many tokens.

        Only inside of it requests are kept, of that many samples at a time.
        """
        return nullcontext()

    def release_memory(self, weights: bool) -> None:  # noqa: B027
        """Gives back the KV cache, and the weights if a weight sync fills them again before the next request."""


def load_engine(name: str) -> type[RolloutEngine]:
    """Imports the engine of this name."""
    engine = load_plugin(engines(), name, "rollout.engine")
    if not (isinstance(engine, type) and issubclass(engine, RolloutEngine)):
        raise ConfigError(f"rollout.engine: '{cut(name)}' is not a subclass of distflow.rollout.engine.RolloutEngine")
    return engine
