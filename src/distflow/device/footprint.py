"""The memory that a run needs on one rank, in each of its phases: estimated from shapes. Imports no torch.

`distflow check --memory` computes the same with the trainer itself, on tensors without memory; a test compares the two.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distflow.config.model_shape import ModelShape
from distflow.config.schema import Offload, Optimizer
from distflow.device.sizes import ACCELERATOR, Sizes
from distflow.plan.layout import Layout
from distflow.plan.tasks import Plan, RunNode

ROLLOUT = "rollout"  # the name of its phase
CONTEXT = 3 << 30  # bytes of the driver's context, communicators, workspaces and captured graphs
PROMPT = 512  # tokens of a prompt, where data.max_prompt does not say
FITS = 0.95  # of the memory; the rest is lost between blocks
_SYNC = 1 << 30  # bytes that a weight sync takes on a rank beside the weights
# Bytes of moments for each parameter that is trained. Muon's are of a model with few embeddings, those of 8 bits of one
# whose rows are multiples of 512.
_MOMENTS: dict[Optimizer, float] = {"adamw": 8, "adamw8bit": 2.125, "muon": 4, "adafactor": 0}
_CHUNK = 1 << 30  # bytes of offloaded moments that visit the device together
_KEPT_LOGITS = 4  # tensors of a chunk of logits that exist at once, in float32
_PREFILL = ACCELERATOR.prompt_tokens  # tokens of prompts that an engine computes at once
# Numbers that there are of a layer at its peak, per token: so many for each hidden unit, and for each one of the MLP.
_PEAK_HIDDEN, _PEAK_FFN = 11, 6  # computed again and with a gradient
_FORWARD_HIDDEN, _FORWARD_FFN = 6, 3
_KEPT_HIDDEN, _KEPT_FFN = 11, 4.25  # without gradient checkpointing: from the forward to the backward pass


@dataclass(frozen=True)
class Settings:
    """The way in which the model of a role is trained or run."""

    dtype_bytes: int  # of the computation
    micro_tokens: int
    gradient_checkpointing: bool
    offload: Offload = "none"
    optimizer: Optimizer = "adamw"
    shard: int | None = None  # dp ranks that parameters are cut over; default: all of them
    trained_share: float = 1.0  # of the parameters: an adapter is a small part of them
    offload_activations: bool = False
    longest: float = 0.0  # tokens of a sequence: it is in one micro-batch, whatever `micro_tokens` says

    def tokens(self, sp: int) -> float:
        """Returns the most tokens of a micro-batch that are on one of `sp` ranks."""
        return max(float(self.micro_tokens), math.ceil(self.longest / sp))


@dataclass(frozen=True)
class Engine:
    """The parts of an engine that take memory."""

    kv_cache: float
    max_sequences: int


@dataclass(frozen=True)
class Phase:
    """A phase of a step, and the bytes of what is in memory at its peak."""

    name: str
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


def shards_of(layout: Layout, shard: int | None) -> int:
    ranks = layout.without_sp.dp
    return min(shard or ranks, ranks)


def phases_of(
    plan: Plan,
    rank: int,
    models: Mapping[str, ModelShape],
    settings: Callable[[str], Settings],
    engine: Engine,
    sizes: Sizes = ACCELERATOR,
    context: float = CONTEXT,
) -> list[Phase]:
    """Returns the phases of a rank, a rollout last; `models` and `settings` are by role."""
    trained = {n.role for n in plan.flow.nodes if n.type == "train"}
    rest: dict[str, float] = {}  # what is there in every phase
    used: dict[str, dict[str, float]] = {}  # role → what comes back while it is used
    passes: dict[str, dict[str, float]] = {}
    for task in (t for t in plan.tasks if isinstance(t, RunNode)):
        node = plan.flow.node(task.node)
        model, layout = models.get(node.role), task.partition.layout.without_sp
        if model is None or node.type == "compute" or layout.replica_of(rank) is None:
            continue
        given, role, sp = settings(node.role), node.role, task.partition.layout.sp
        if node.generates:
            sampler = 4.0 * _KEPT_LOGITS * engine.max_sequences * model.vocab
            passes[ROLLOUT] = {
                "weights of the engine": model.rank_params(layout.tp) * given.dtype_bytes,
                "KV cache": engine.kv_cache,
                "sampling": sampler,
                "activations": _PREFILL * given.dtype_bytes * _forward(model) / layout.tp,
            }
            continue
        own = model.rank_params(layout.tp) / shards_of(layout, given.shard)
        if role not in used:
            used[role] = _state(rest, role, own, given, role in trained)
        name = f"update of {role}" if node.type == "train" else f"log-probs of {role}"
        parts = _pass(model, layout, given, given.tokens(sp), sizes, node.type == "train") | used[role]
        if node.type == "train":
            parts["gradients"] = 4 * own * given.trained_share
            if given.offload != "none":
                parts["moments on their visit"] = min(8 * own * given.trained_share, 2.0 * _CHUNK)
        passes[name] = parts
    if set(passes) == {ROLLOUT} and len(plan.chains()) > 1:  # others train; the engine keeps its memory meanwhile
        passes[ROLLOUT]["weight sync"] = float(_SYNC)
    rest = {"context": float(context), **rest}
    names = sorted(passes, key=lambda name: name == ROLLOUT)
    return [Phase("between steps", rest), *(Phase(name, rest | passes[name]) for name in names)]


def _state(rest: dict[str, float], role: str, own: float, given: Settings, trained: bool) -> dict[str, float]:
    """Adds what stays between uses to `rest`; returns what is there while the role is used."""
    share = given.trained_share if trained else 0.0
    weights = {f"weights of {role}": own * (4 * share + given.dtype_bytes * (1 - share))}
    if trained and given.offload == "none":
        rest[f"moments of {role}"] = _MOMENTS[given.optimizer] * own * share
    if given.offload == "all":
        return weights
    rest.update(weights)
    return {}


def _forward(model: ModelShape) -> float:
    """Returns how many numbers of a token there are at once in a forward pass."""
    return _FORWARD_HIDDEN * model.hidden + _FORWARD_FFN * model.ffn * model.active


def _pass(
    model: ModelShape, layout: Layout, given: Settings, tokens: float, sizes: Sizes, train: bool
) -> dict[str, float]:
    """Returns what a forward pass on so many tokens needs at its peak, or forward and backward."""
    size, tp = given.dtype_bytes, layout.tp
    table, tables = model.vocab * model.hidden, model.table_params  # the output layer's, and with the embedding's
    layer = model.layer_params / tp
    cut = shards_of(layout, given.shard) > 1
    gathered = size if cut or size < 4 else 0  # bytes per parameter
    whole = train and given.trained_share == 1  # gradients of all parameters
    hidden = tokens * model.hidden * size / tp
    ffn = tokens * model.ffn * model.active * size / tp
    if not train or given.offload_activations:
        kept = 0.0
    elif given.gradient_checkpointing:
        kept = model.layers * hidden * tp
    else:
        kept = model.layers * (_KEPT_HIDDEN * hidden + _KEPT_FFN * ffn)
    one_layer = _PEAK_HIDDEN * hidden + _PEAK_FFN * ffn if train else tokens * size * _forward(model) / tp
    if train and not given.gradient_checkpointing:
        one_layer /= 2  # the other half is kept
    chunk = min(tokens, max(sizes.logit_tokens, sizes.logits // model.vocab)) * model.vocab
    in_layer = {
        "gathered weights": (2 * layer + tables) * gathered,
        "activations": kept + one_layer,
        "whole gradients": (layer * (size + 4) + table * size) * whole,  # as computed, and the layer's to be summed
    }
    in_head = {
        "gathered weights": (layer + tables) * gathered,
        "activations": kept + 5 * hidden,
        "logits": chunk * (4.0 + 4.0 * train + size),
        # The output layer's is summed in float32, to which each chunk's is added, and they are large.
        "whole gradients": 2 * table * 4.0 * whole,
    }
    at_end = {"gathered weights": tables * gathered, "whole gradients": tables * (size + 4.0) * whole}
    return max((in_layer, in_head, at_end), key=lambda parts: sum(parts.values()))
