"""vLLM as a rollout engine, inside the worker's process. Only this file and sampler.py know vLLM's internals.

vLLM schedules, caches keys and values, and computes logits. Weights are filled in place by the weight sync, through
views of its fused parameters. Tokens are sampled by a logits processor of ours, with the noise and the log-probs of
`sampling.py`: a sample gets the tokens that the built-in engine gives it, unless rounding decides between two of them.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distflow.config.schema import LoraConfig, RolloutConfig
from distflow.errors import ConfigError
from distflow.model.lora import LoraAdapter
from distflow.model.source import Source, kv_bytes
from distflow.model.tensor_parallel import parameter_specs, tp_styles
from distflow.plan.layout import Layout
from distflow.rollout.engine import Completion, EngineSetup, Request, RolloutEngine, Wake, never
from distflow.rollout.vllm.sampler import make_sampler
from distflow.rollout.vllm.support import LORA_RANKS, architecture, check_head_size, check_vllm
from distflow.rollout.vllm.undisturbed import undisturbed_process
from distflow.util.text import human_bytes
from distflow.weights.shards import Shards, TensorSpec, size

_PADDING = 64  # vLLM pads a vocabulary to a multiple of it
_BLOCK = 32  # tokens of KV cache that are allocated together, and shared by requests that begin alike
_ADAPTER = 1  # its id there
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # which has another kind of logits processors
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}


def supported_head_sizes() -> list[int]:
    """Returns the dimensions that vLLM for CPU has attention for."""
    with undisturbed_process(_SETTINGS, prefix="VLLM_"):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return sizes


def cut_rows(specs: Sequence[TensorSpec], tp: int) -> dict[str, int]:
    """Returns embedding → rows of each tensor-parallel rank: vLLM cuts embeddings, and the last rows are padding."""
    embeddings = [s for s in specs if s.name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    return {s.name: -(-s.shape[0] // _PADDING) * _PADDING // tp for s in embeddings if tp > 1}


class VllmEngine(RolloutEngine):
    """One rank's part of the engine: the ranks of a tensor-parallel replica have an engine each, which run in lockstep.

    An adapter is held apart from the weights.
    """

    keeps_adapter = True

    @classmethod
    def check(cls, source: Source, config: RolloutConfig, device: torch.device, lora: LoraConfig | None) -> None:
        check_vllm(source, lora)
        if device.type == "cpu":
            check_head_size(source, supported_head_sizes())

    @classmethod
    def shards(cls, specs: Sequence[TensorSpec], layout: Layout) -> Shards:
        return Shards(layout, 1, cut_rows(specs, layout.tp))

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        source, config, layout, lora = setup.source, setup.config, setup.layout, setup.lora
        self.device, self.asleep = setup.device, False
        skeleton = source.skeleton()
        styles = tp_styles(skeleton, layout.tp, "placement.nodes.actor.generate")
        self.weight_specs = parameter_specs(skeleton, styles)
        self.adapter_specs = LoraAdapter(skeleton, lora, styles).specs if lora else []
        self._requests: dict[str, Request] = {}  # unfinished ones, by vLLM's id
        self._logprobs: dict[int, list[float]] = {}  # id of a request → of its response so far
        cache_bytes = int(config.kv_cache_gb * (1 << 30))
        blocks = cache_bytes // (kv_bytes(source.config, setup.dtype, layout.tp) * _BLOCK)
        self.longest = min(setup.longest, (blocks - 1) * _BLOCK)  # one block is never used
        if self.longest < 1:
            raise ConfigError(f"rollout.kv_cache_gb: {human_bytes(cache_bytes)} hold no sequence; raise it")
        replica = layout.replicas[layout.replica_of(setup.rank) or 0]
        with undisturbed_process(_SETTINGS, prefix="VLLM_"), tempfile.TemporaryDirectory() as folder:
            _write_config(source, folder)
            self.engine = _start(
                replica,
                setup.rank,
                setup.device,
                logits_processors=[make_sampler(self._logprobs)],
                model=folder,
                dtype=setup.dtype,
                max_model_len=self.longest,
                max_num_seqs=config.max_sequences,
                kv_cache_memory_bytes=cache_bytes,
                enable_lora=lora is not None,
                max_lora_rank=next(n for n in LORA_RANKS if not lora or n >= lora.rank),
            )
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.model: nn.Module = runner.model
        if lora:
            _register_adapter(runner.lora_manager, lora.rank)
        self._check_views()

    def weight_targets(self) -> Mapping[str, Tensor]:
        if self.asleep:
            self.engine.wake_up(["weights"])
        return self.held_weights()

    def held_weights(self) -> Mapping[str, Tensor]:
        packed: Mapping[str, Sequence[str]] = getattr(self.model, "packed_modules_mapping", {})
        fused = {part: (whole, i) for whole, parts in packed.items() for i, part in enumerate(parts)}
        modules = dict(self.model.named_modules(remove_duplicate=False))
        return {s.name: _view(modules, fused, s) for s in [*self.weight_specs, *self.adapter_specs]}

    def commit_weights(self, version: int) -> None:
        assert not self.has_unfinished
        self._wake()
        self.engine.reset_prefix_cache()  # its keys and values are those of the weights before
        self.weight_version = version

    def add_request(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._wake()
        params, name = request.params, str(request.id)
        assert name not in self._requests
        room = request.room
        if len(request.prompt) + room > self.longest:
            raise ConfigError(
                f"rollout.kv_cache_gb: a sequence of {len(request.prompt) + room} tokens is longer than the"
                f" {self.longest} that the KV cache holds; raise it, or lower rollout.max_tokens"
            )
        given = SamplingParams(
            temperature=0.0,  # takes the one token that our sampler leaves
            max_tokens=room,
            stop_token_ids=sorted(params.stop),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"request": request},
        )
        adapter = _adapter_request() if self.adapter_specs else None
        self._requests[name] = request
        self.engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, given, lora_request=adapter)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self, wake: Wake = never) -> list[Completion]:
        finished: list[Completion] = []
        woken = False
        while self._requests and not finished and not woken:
            outputs = [out for out in self.engine.step() if out.finished and out.request_id in self._requests]
            finished, woken = [self._completion(out) for out in outputs], self._agree(wake)
        return finished

    def _agree(self, wake: Wake) -> bool:
        """Returns what the first rank of the replica says."""
        from vllm.distributed import get_tp_group

        if wake is never:
            return False
        return bool(get_tp_group().broadcast(torch.tensor([int(wake())], device=self.device)))

    # It has nothing to `forget`: vLLM keeps the blocks of all requests, and reuses those not used for longest.

    def abort(self, request_ids: Iterable[int]) -> None:
        dropped = [str(i) for i in request_ids if str(i) in self._requests]
        self.engine.abort_request(dropped)
        for name in dropped:
            self._logprobs.pop(self._requests.pop(name).id, None)

    def _completion(self, output: Any) -> Completion:
        request = self._requests.pop(output.request_id)
        tokens = np.array(output.outputs[0].token_ids, np.int64)
        logprobs = np.array(self._logprobs.pop(request.id), np.float32)
        assert len(logprobs) == len(tokens)
        finished = int(tokens[-1]) in request.params.stop
        reused = output.num_cached_tokens or 0
        return Completion(request.sample_id, tokens, logprobs, finished, self.weight_version, request.id, reused)

    def release_memory(self, weights: bool) -> None:
        if self.device.type != "cpu":  # where vLLM has no sleep mode
            self.engine.reset_prefix_cache()
            self.engine.sleep(level=2 if weights else 1)
            self.asleep = True

    def _wake(self) -> None:
        if self.asleep:
            self.engine.wake_up()
            self.asleep = False

    def _check_views(self) -> None:
        """Refuses a model with parameters in vLLM that the weight sync would not fill."""
        views, shards = self.held_weights(), self.shards(self.weight_specs, self.setup.layout)
        for spec in [*self.weight_specs, *self.adapter_specs]:
            wanted = tuple(high - low for low, high in shards.box(spec, self.setup.rank))
            if tuple(views[spec.name].shape) != wanted:
                raise ConfigError(
                    f"rollout.engine: vLLM has {spec.name} as {tuple(views[spec.name].shape)}, and transformers as"
                    f" {wanted}; use `engine: builtin`"
                )
        filled = sum(size(shards.box(spec, self.setup.rank)) for spec in self.weight_specs)
        held = sum(p.numel() for p in self.model.parameters()) - _padding(self.model)
        if filled != held:
            raise ConfigError(
                f"rollout.engine: vLLM has {held:,} weights in this model, and {filled:,} would be synced;"
                " use `engine: builtin`"
            )


def _view(modules: Mapping[str, Any], fused: Mapping[str, tuple[str, int]], spec: TensorSpec) -> Tensor:
    """Returns what vLLM holds of a parameter of transformers, or of a matrix of PEFT's adapter, as a view."""
    layer, _, matrix = spec.name.partition(".lora_")
    layer, _, kind = (layer, "", "") if matrix else layer.rpartition(".")
    parent, dot, leaf = layer.rpartition(".")
    whole, part = fused.get(leaf, (leaf, 0))
    module = modules[parent + dot + whole]
    if matrix:  # in memory for an adapter of the largest rank
        stacked: Tensor = (module.lora_a_stacked if matrix[0] == "A" else module.lora_b_stacked)[part][0, 0]
        return stacked[: spec.shape[0]] if matrix[0] == "A" else stacked[:, : spec.shape[1]]
    module = getattr(module, "base_layer", module)
    parameter: Tensor = getattr(module, kind).detach()
    if hasattr(module, "shard_indices"):  # an embedding, padded
        return parameter[: module.shard_indices.num_org_elements]
    if whole == leaf:
        return parameter
    rows = module.output_partition_sizes
    return parameter.narrow(0, sum(rows[:part]), rows[part])


def _padding(model: nn.Module) -> int:
    """Returns how many weights of embeddings are no token's."""
    embeddings: dict[int, Any] = {id(m.weight): m for m in model.modules() if hasattr(m, "shard_indices")}
    shapes = [(m.weight.shape, m.shard_indices.num_org_elements) for m in embeddings.values()]
    return sum((rows - used) * width for (rows, width), used in shapes)


def _start(replica: Sequence[int], rank: int, device: torch.device, **arguments: Any) -> Any:
    """Starts vLLM on one rank of a replica, with weights that are yet to be filled."""
    from vllm import EngineArgs
    from vllm.v1.engine import core
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker import gpu_worker

    class Executor(UniProcExecutor):  # type: ignore[misc]
        """Each rank of a replica schedules for itself; all come to the same decisions."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # What follows the colon names the memory that the ranks of one host share.
            name = f"distflow:{socket.gethostname()}-{os.environ.get('MASTER_PORT', os.getpid())}-{replica[0]}"
            return name, replica.index(rank), device.index or 0

    on_cpu = device.type == "cpu"
    given = EngineArgs(
        **arguments,
        tensor_parallel_size=len(replica),
        distributed_executor_backend=Executor,
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        block_size=_BLOCK if on_cpu else None,
        enforce_eager=on_cpu,
        enable_prefix_caching=True,
        enable_sleep_mode=not on_cpu,
        async_scheduling=False,  # our sampler needs the tokens before
        gpu_memory_utilization=0.01,  # the size of the KV cache is given; the rest may be a trainer's
        disable_log_stats=True,
    )
    with (
        patch.object(gpu_worker, "init_distributed_environment", lambda *a, **k: _init_groups(replica, rank, device)),
        _cpu_set_up() if on_cpu else nullcontext(),
    ):
        core.cleanup_dist_env_and_memory = lambda: None  # at exit it would destroy process groups, the run's among them
        return LLMEngine.from_engine_args(given, enable_multiprocessing=False)


def _init_groups(replica: Sequence[int], rank: int, device: torch.device) -> None:
    """Makes vLLM's process groups of a replica's ranks alone; vLLM would make every rank of the run create them all."""
    from vllm.distributed import parallel_state as state
    from vllm.platforms import current_platform

    new_group: Any = dist.new_group
    backend, local_rank = current_platform.dist_backend, device.index or 0
    with patch.object(dist, "new_group", lambda *a, **k: new_group(*a, **k, use_local_synchronization=True)):
        state._WORLD = state.init_world_group(list(replica), local_rank, backend)
        state._NODE_COUNT = state._node_count(state._WORLD.cpu_group)
        make = state.init_model_parallel_group
        state._TP = state._ETP = make([list(replica)], local_rank, backend, group_name="tp")
        alone = make([[rank]], local_rank, backend, group_name="alone")
    state._PP = state._DP = state._DCP = state._PCP = alone


@contextmanager
def _cpu_set_up() -> Iterator[None]:
    """Starts vLLM for CPU in a way that suits a process with others in it.

    After loading it would pack weights for oneDNN and never look again at the synced ones. It would bind all
    memory to one NUMA node; compile a function of embeddings, which takes a C++ compiler and half a minute; and fail
    once numba is in use, in whose bindings it looks for kernels.
    """
    from vllm.model_executor.layers import utils, vocab_parallel_embedding
    from vllm.triton_utils import dispatcher

    class System:
        @property
        def modules(self) -> dict[str, Any]:
            return {name: m for name, m in sys.modules.items() if not name.startswith("llvmlite")}

    def dispatch_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    masked = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = getattr(masked, "_torchdynamo_orig_callable", masked)
    with (
        patch.object(utils, "dispatch_cpu_unquantized_gemm", dispatch_linear),
        patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None),
        patch.object(dispatcher, "sys", System()),
    ):
        yield


def _write_config(source: Source, folder: str) -> None:
    """Writes the model's config, which is all that vLLM reads."""
    values = source.config.to_dict() | {"architectures": [architecture(source)]}
    type(source.config).from_dict(values).save_pretrained(folder)


def _register_adapter(manager: Any, rank: int) -> None:
    """Tells vLLM of an adapter that it does not read from a file: zeros, which the weight sync fills."""
    manager.add_dummy_lora(_adapter_request(), rank)
    manager._adapter_manager.activate_adapter(_ADAPTER)


def _adapter_request() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", _ADAPTER, "in memory")
