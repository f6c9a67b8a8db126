"""The memory of a worker: its state between steps, and the peak of each phase."""

from dataclasses import dataclass

from distflow.device.footprint import CONTEXT, ROLLOUT, Engine, Settings, phases_of
from distflow.device.sizes import ACCELERATOR, CPU
from distflow.errors import ConfigError
from distflow.plan.tasks import Plan
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware
from distflow.util.text import human_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker, at most. `state`: weights, moments and the device's own, which stay between steps."""

    state: float = 0.0
    training: float = 0.0  # gradients, gathered layers and activations
    generation: float = 0.0  # the engine's weights and KV cache

    @property
    def peak(self) -> float:
        """Returns the larger of generation and training, as the engine releases its memory in between."""
        return self.state + max(self.training, self.generation)


def memory_of(plan: Plan, rank: int, costs: Costs, hardware: Hardware) -> Memory:
    """Returns the memory of a rank, by the estimate from which a run chooses what to offload."""
    given = Settings(
        costs.dtype_bytes,
        costs.micro_tokens,
        costs.gradient_checkpointing,
        costs.offload,
        shard=costs.shard,
        longest=costs.longest,
    )
    on = (CPU, 0.0) if hardware.device.kind == "cpu" else (ACCELERATOR, CONTEXT)
    engine = Engine(costs.kv_cache, costs.max_sequences)
    between, *phases = phases_of(plan, rank, costs.models, lambda role: given, engine, *on)
    generation, training = (
        max((p.bytes - between.bytes for p in phases if (p.name == ROLLOUT) == rollout), default=0.0)
        for rollout in (True, False)
    )
    return Memory(between.bytes, training, generation)


def check_memory(plan: Plan, memories: dict[tuple[int, ...], Memory], hardware: Hardware, costs: Costs) -> None:
    """Raises if a worker needs more memory than its device has, with ways to need less."""
    limit = hardware.device.memory
    ranks, memory = max(memories.items(), key=lambda item: item[1].peak)
    if memory.peak <= limit:
        return
    parts = {"weights and Adam": memory.state, "training": memory.training, "generation": memory.generation}
    largest = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size)
    ways = []
    if memory.state > limit / 2:
        ways.append(f"cut parameters over {memory.state / (limit / 2):.1f} × as many workers (more of them, or tp)")
    if memory.training > limit / 4:
        if costs.longest > costs.micro_tokens:
            ways.append(f"divide sequences of {costs.longest:.0f} tokens over more ranks (sp)")
        else:
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
