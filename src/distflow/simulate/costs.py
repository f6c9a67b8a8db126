"""The costs of nodes, apart from the hardware: models, lengths, bytes of fields, or measured seconds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distflow.config.model_shape import Floats, ModelShape
from distflow.config.schema import Offload
from distflow.errors import ConfigError, cut, suggest
from distflow.plan.field_bytes import FieldBytes
from distflow.plan.tasks import Plan


@dataclass(frozen=True)
class Costs:
    """`seconds` of a node, the same on every worker, replace the roofline of its role's model."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, ModelShape] = field(default_factory=dict)  # role → its model
    weight_bytes: Mapping[str, float] = field(default_factory=dict)  # role → bytes synced; default: its model's
    fields: Mapping[str, FieldBytes] = field(default_factory=dict)  # other fields have the bytes that the plan expects
    prompt_tokens: float = 0.0
    max_prompt: float | None = None  # to which a single controller pads prompts; default: it does not
    response_tokens: float = 0.0  # mean
    lengths: Sequence[int] | None = None  # of every response of the step, instead of a distribution
    max_tokens: float = float("inf")  # of a response
    spread: float = 0.0  # standard deviation of the logarithm of the response length
    seed: int = 0
    dtype_bytes: int = 2  # of the computation, and of synced weights
    micro_tokens: int = 16384
    micro_samples: int | None = None  # of a micro-batch that is trained on, instead of a budget of tokens
    forward_samples: int | None = None  # the same where nothing is trained
    own_mini_batches: bool = False  # each worker cuts its own samples, as others do, not all workers the step's prompts
    gradient_checkpointing: bool = True
    offload: Offload = "none"
    max_sequences: int = 256  # generated at the same time by one engine
    kv_cache: float = 2.0e9  # bytes per worker
    shard: int | None = None  # dp ranks that parameters are cut over; default: all of them

    @property
    def longest(self) -> float:
        """Returns the most tokens of a sequence: it is in one micro-batch, whatever `micro_tokens` says."""
        response = max(self.lengths, default=0) if self.lengths is not None else self.max_tokens
        return self.prompt_tokens + (response if math.isfinite(response) else self.response_tokens)

    def check(self, plan: Plan) -> None:
        """Raises if a node that has seconds is not in the flow."""
        ids = [n.id for n in plan.flow.nodes]
        for node, seconds in self.seconds.items():
            if node not in ids:
                raise ConfigError(f"--node-seconds: the flow has no node '{cut(node)}'{suggest(node, ids)}")
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"--node-seconds: {node} is {seconds}; give seconds, 0 or more")
        if self.lengths is not None and len(self.lengths) != plan.samples:
            raise ConfigError(f"lengths: there are {len(self.lengths)}, and the plan has {plan.samples} samples")

    def response_lengths(self, samples: int) -> Floats:
        """Returns the length of each response of a step: log-normal, cut at `max_tokens`, with the given mean."""
        if self.lengths is not None:
            return np.asarray(self.lengths, np.float64)
        mean = min(self.response_tokens, self.max_tokens)
        if not self.spread or mean in (0.0, self.max_tokens):
            return np.full(samples, mean)
        shape = np.exp(self.spread * np.random.default_rng(self.seed).standard_normal(samples))
        low, high = 0.0, self.max_tokens / float(shape.min()) if np.isfinite(self.max_tokens) else mean * 1e6
        for _ in range(50):  # the scale at which the mean of the cut lengths is right
            scale = (low + high) / 2
            low, high = (scale, high) if np.minimum(scale * shape, self.max_tokens).mean() < mean else (low, scale)
        return np.minimum(high * shape, self.max_tokens)

    def sample_bytes(self, plan: Plan, fields: tuple[str, ...], lengths: Floats) -> Floats:
        """Returns the bytes of each sample in these fields."""
        size = np.zeros(len(lengths))
        for f in fields:
            b = self.fields.get(f) or FieldBytes(sample=plan.bytes[f])
            size += b.sample + b.prompt_token * self.prompt_tokens + b.response_token * lengths
        return size

    def weights(self, role: str) -> float:
        """Returns the bytes of a role's weights in a sync; 0 if unknown."""
        if role in self.weight_bytes:
            return self.weight_bytes[role]
        model = self.models.get(role)
        return model.params * self.dtype_bytes if model else 0.0
