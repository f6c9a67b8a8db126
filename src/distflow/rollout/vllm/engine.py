"""vLLM as a rollout engine, inside the worker's process. Only this folder knows vLLM's internals.

vLLM schedules, caches keys and values, and computes logits. Weights are filled in place by the weight sync, through
views of its fused parameters. Tokens are sampled by a logits processor of ours, with the noise and the log-probs of
`sampling.py`: a sample gets the tokens that the built-in engine gives it, unless rounding decides between two of them.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distflow.config.schema import LoraConfig, RolloutConfig
from distflow.device.sizes import sizes_of
from distflow.errors import ConfigError
from distflow.model.lora import LoraAdapter
from distflow.model.source import Source, kv_bytes
from distflow.model.tensor_parallel import parameter_specs, tp_styles
from distflow.plan.layout import Layout
from distflow.rollout.engine import Completion, EngineSetup, Request, RolloutEngine, Wake, never
from distflow.rollout.vllm.arguments import check_arguments
from distflow.rollout.vllm.own_sampler import (
    Noise,
    check_own_sampler,
    logprobs_mode,
    logprobs_of,
    sampling_arguments,
)
from distflow.rollout.vllm.sampler import make_sampler
from distflow.rollout.vllm.start import BLOCK, start_vllm
from distflow.rollout.vllm.support import LORA_RANKS, architecture, check_head_size, check_vllm
from distflow.rollout.vllm.undisturbed import undisturbed_process
from distflow.rollout.vllm.vision import Vision, start_arguments, view_name
from distflow.util.text import human_bytes
from distflow.weights.shards import Shards, TensorSpec, size

_PADDING = 64  # vLLM pads a vocabulary to a multiple of it
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


def known_arguments() -> list[str]:
    """Returns the names of vLLM's EngineArgs."""
    with undisturbed_process(_SETTINGS, prefix="VLLM_"):
        from vllm import EngineArgs
    return [f.name for f in fields(EngineArgs)]


def cut_rows(specs: Sequence[TensorSpec], tp: int) -> dict[str, int]:
    """Returns embedding → rows of each tensor-parallel rank: vLLM cuts embeddings, and the last rows are padding."""
    embeddings = [s for s in specs if s.name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    return {s.name: -(-s.shape[0] // _PADDING) * _PADDING // tp for s in embeddings if tp > 1}


class VllmEngine(RolloutEngine):
    """One rank's part of the engine: the ranks of a tensor-parallel replica have an engine each, which run in lockstep.

    An adapter is held apart from the weights.
    """

    interruptible = True
    keeps_adapter = True

    @classmethod
    def check(cls, source: Source, config: RolloutConfig, device: torch.device, lora: LoraConfig | None) -> None:
        check_vllm(source, lora)
        if config.vllm.args:
            check_arguments(config.vllm.args, known_arguments())
        if config.vllm.sampler == "vllm":
            check_own_sampler(config)
            if config.partial:
                raise ConfigError(
                    "rollout.partial: vLLM's own sampler runs ahead, so how far a response has come when it is"
                    " interrupted would depend on time; use rollout.vllm.sampler: distflow, or leave partial out"
                )
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
        blocks = cache_bytes // (kv_bytes(source.config, setup.dtype, layout.tp) * BLOCK)
        self.longest = min(setup.longest, (blocks - 1) * BLOCK)  # one block is never used
        if self.longest < 1:
            raise ConfigError(f"rollout.kv_cache_gb: {human_bytes(cache_bytes)} hold no sequence; raise it")
        replica = layout.replicas[layout.replica_of(setup.rank) or 0]
        self._noise = Noise(setup.device, replica[0]) if config.vllm.sampler == "vllm" else None
        arguments = {
            "dtype": setup.dtype,
            "max_model_len": self.longest,
            "max_num_seqs": config.max_sequences,
            "max_num_batched_tokens": max(sizes_of(setup.device.type).prompt_tokens, config.max_sequences),
            "kv_cache_memory_bytes": cache_bytes,
            "enable_lora": lora is not None,
            "max_lora_rank": next(n for n in LORA_RANKS if not lora or n >= lora.rank),
        }
        overrides = {"head_dtype": "float32"} if setup.dtype.itemsize == 2 else {}  # as the trainer computes logits
        arguments |= config.vllm.args | {"hf_overrides": overrides | config.vllm.args.get("hf_overrides", {})}
        with undisturbed_process(_SETTINGS, prefix="VLLM_"):
            if setup.images:
                arguments |= start_arguments(architecture(source), layout.tp)
            if self._noise:
                arguments |= {"logprobs_mode": logprobs_mode(config), "async_scheduling": True}
            else:  # which needs the tokens before
                arguments |= {"logits_processors": [make_sampler(self._logprobs)], "async_scheduling": False}
            self.engine = start_vllm(replica, setup.rank, setup.device, {"model": config_folder(source), **arguments})
        runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.model: nn.Module = runner.model
        self._vision = Vision(setup.images, self.engine, self.model) if setup.images else None
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
        specs = [*self.weight_specs, *self.adapter_specs]
        return {s.name: _view(modules, fused, replace(s, name=view_name(self.model, s.name))) for s in specs}

    def commit_weights(self, version: int) -> None:
        assert not self.has_unfinished
        self._wake()
        self._finish_ahead()
        self.engine.reset_prefix_cache()  # its keys and values are those of the weights before
        if self._vision:
            self._vision.forget()
        self.weight_version = version
        if self._noise:
            self._noise.reset()

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
        if self._noise:
            self._noise.seed(request.seed, self.weight_version)
            left = max(0, params.min_tokens - request.position)
            sampling = {**sampling_arguments(params), "min_tokens": min(left, room)}
        else:  # takes the one token that our sampler leaves
            sampling = {"temperature": 0.0, "extra_args": {"request": request}}
        given = SamplingParams(
            max_tokens=room,
            stop_token_ids=sorted(params.stop),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **sampling,
        )
        adapter = _adapter_request() if self.adapter_specs else None
        self._requests[name] = request
        seen = self._vision if request.images else None
        prompt = seen.prompt(request) if seen else {"prompt_token_ids": list(request.prompt)}
        self.engine.add_request(name, prompt, given, lora_request=adapter)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self, wake: Wake = never) -> list[Completion]:
        finished: list[Completion] = []
        woken = False
        while self._requests and not finished and not woken:
            with self._noise.drawn() if self._noise else nullcontext():
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

    def interrupt(self) -> list[Completion]:
        scheduler = self.engine.engine_core.engine_core.scheduler
        names: Mapping[str, Sequence[str]] = self.engine.output_processor.external_req_ids
        responses = []
        for name, request in self._requests.items():
            tokens = np.array(scheduler.requests[names[name][0]].output_token_ids, np.int64)
            logprobs = np.array(self._logprobs.get(request.id, [])[: len(tokens)], np.float32)
            assert len(logprobs) == len(tokens)
            responses.append(Completion(request.sample_id, tokens, logprobs, False, self.weight_version, request.id))
        self.abort([r.id for r in self._requests.values()])
        return responses

    def _finish_ahead(self) -> None:
        """Ends the step that vLLM's own sampler has begun ahead, of requests that are gone."""
        core = self.engine.engine_core.engine_core
        while core.batch_queue:
            self.engine.step()

    def _completion(self, output: Any) -> Completion:
        request = self._requests.pop(output.request_id)
        tokens = np.array(output.outputs[0].token_ids, np.int64)
        own = self._noise is None
        logprobs = np.array(self._logprobs.pop(request.id), np.float32) if own else logprobs_of(output.outputs[0])
        assert len(logprobs) == len(tokens)
        finished = int(tokens[-1]) in request.params.stop
        reused = output.num_cached_tokens or 0
        return Completion(request.sample_id, tokens, logprobs, finished, self.weight_version, request.id, reused)

    def release_memory(self, weights: bool) -> None:
        if self.device.type != "cpu":  # where vLLM has no sleep mode
            self._finish_ahead()
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


def config_folder(source: Source) -> str:
    """Returns a folder with the model's config, which is all that vLLM reads.

    It is the same for the same model: its path is in the keys of vLLM's cache of compiled graphs, beside which it is.
    """
    values = source.config.to_dict() | {"architectures": [architecture(source)]}
    config = type(source.config).from_dict(values)
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
    folder = cache / "distflow" / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:  # workers may do the same at the same time
            config.save_pretrained(fresh)
            for file in Path(fresh).iterdir():
                file.replace(folder / file.name)
    except OSError as e:
        raise ConfigError(
            f"rollout.engine: {folder} cannot be written ({e.strerror}); set VLLM_CACHE_ROOT to another folder"
        ) from e
    return str(folder)


def _register_adapter(manager: Any, rank: int) -> None:
    """Tells vLLM of an adapter that it does not read from a file: zeros, which the weight sync fills."""
    manager.add_dummy_lora(_adapter_request(), rank)
    manager._adapter_manager.activate_adapter(_ADAPTER)


def _adapter_request() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", _ADAPTER, "in memory")
