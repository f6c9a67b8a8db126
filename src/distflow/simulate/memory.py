"""The memory of a worker: its state between steps, and the peak of each phase."""

from dataclasses import dataclass

from distflow.config.model_shape import ModelShape
from distflow.errors import ConfigError
from distflow.plan.layout import Layout
from distflow.plan.tasks import Plan, RunNode
from distflow.simulate.compute import shards_of
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware
from distflow.util.text import human_bytes

_TRAINED = 16  # bytes per parameter: float32 weights, gradients and two moments of Adam
_LAYER_BYTES = 34  # bytes of activations per token, layer and hidden unit, without gradient checkpointing
_LOGITS = 1024  # tokens whose logits exist at once


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker, at most. `state`: weights, gradients and moments that stay between steps."""

    state: float = 0.0
    training: float = 0.0  # gathered layers and activations
    generation: float = 0.0  # the engine's weights and KV cache

    @property
    def peak(self) -> float:
        """The larger of generation and training, as the engine releases its memory in between."""
        return self.state + max(self.training, self.generation)


def memory_of(plan: Plan, rank: int, costs: Costs) -> Memory:
    """Returns the memory of a rank, from the models of the nodes that it runs."""
    state = training = generation = 0.0
    seen: set[str] = set()
    trained = {n.role for n in plan.flow.nodes if n.type == "train"}
    for task in (t for t in plan.tasks if isinstance(t, RunNode)):
        node = plan.flow.node(task.node)
        model, layout = costs.models.get(node.role), task.partition.layout
        if model is None or node.type == "compute" or layout.replica_of(rank) is None:
            continue
        if node.generates:
            generation = max(generation, model.params * costs.dtype_bytes / layout.tp + costs.kv_cache)
            continue
        training = max(training, _pass_memory(model, layout, costs, node.type == "train"))
        if node.role not in seen:
            seen.add(node.role)
            per_parameter = _TRAINED if node.role in trained else costs.dtype_bytes
            state += per_parameter * model.params / (shards_of(layout, costs) * layout.tp)
    return Memory(state, training, generation)


def _pass_memory(model: ModelShape, layout: Layout, costs: Costs, train: bool) -> float:
    layer = (model.params / model.layers) * costs.dtype_bytes / layout.tp * (2 if shards_of(layout, costs) > 1 else 0)
    logits = _LOGITS * model.vocab * 4 / layout.tp
    one_layer = _LAYER_BYTES * model.hidden / layout.tp
    kept = model.layers * (2 * model.hidden if costs.gradient_checkpointing else one_layer) if train else 0
    return layer + logits + costs.micro_tokens * (kept + one_layer)


def check_memory(plan: Plan, memories: dict[tuple[int, ...], Memory], hardware: Hardware, costs: Costs) -> None:
    """Raises if a worker needs more memory than its device has, with ways to need less."""
    limit = hardware.device.memory
    ranks, memory = max(memories.items(), key=lambda item: item[1].peak)
    if memory.peak <= limit:
        return
    parts = {"weights, gradients and Adam": memory.state, "training": memory.training, "generation": memory.generation}
    largest = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size)
    ways = []
    if memory.state > limit / 2:
        ways.append(f"cut parameters over {memory.state / (limit / 2):.1f} × as many workers (more of them, or tp)")
    if memory.training > limit / 4:
        ways.append(f"lower train.micro_tokens below {costs.micro_tokens}")
        if not costs.gradient_checkpointing:
            ways.append("set train.gradient_checkpointing")
    if memory.generation > limit / 2:
        ways.append("raise tp of the node that generates, or lower rollout.kv_cache_gb")
    raise ConfigError(
        f"a worker of {hardware.name} has {human_bytes(limit)}, and rank {ranks[0]} needs {human_bytes(memory.peak)},"
        f" {human_bytes(memory.peak - limit)} too much ({largest});"
        f" {'; '.join(ways) or 'use more workers or a larger device'}"
    )
