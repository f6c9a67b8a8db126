# mypy: ignore-errors
"""siiRL 0.2.0 on a CPU, for siirl_step.py; Ray calls `prepare` in every worker before anything else.

Besides its devices, the rollout by Hugging Face is replaced: the one it has does not run on siiRL's own batches. The
graph, its workers, the data coordinator, FSDP, advantages and metrics are siiRL's.
"""

import importlib.machinery
import json
import os
import sys
import time
from functools import cache
from unittest.mock import MagicMock

ABSENT = ("cv2", "decord", "flash_attn", "imageio", "qwen_vl_utils", "sglang", "timm", "torchvision", "vllm", "wandb")
WORKER = "siirl.dag_worker.dagworker:DAGWorker."


class _Absent:
    """Imports as a mock what siiRL imports for GPUs and images, and does not use here."""

    def find_spec(self, name, path=None, target=None):
        found = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "0.8.5"
        return module

    def exec_module(self, module):
        pass


@cache
def prepare() -> None:
    """Replaces what needs a GPU, and takes the time of steps if PEER_TIMES says where to write it."""
    from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer  # noqa: F401  # before the mocks

    sys.meta_path.insert(0, _Absent())
    import siirl.utils.extras.device as device
    from cpu_device import replace_devices

    replace_devices(device)
    import siirl.utils.model_utils.torch_functional as functional

    functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False  # its name; flash-attn is a mock here
    import siirl.engine.rollout

    siirl.engine.rollout.HFRollout = _rollout()
    from siirl.dag_worker import dag_utils, dagworker
    from siirl.execution.dag import NodeRole

    setup = dag_utils.setup_sharding_manager

    def share_module(config, groups, group, workers):
        workers[NodeRole.ROLLOUT].rollout.module = workers[NodeRole.ACTOR].actor_module_fsdp
        return setup(config, groups, group, workers)

    dag_utils.setup_sharding_manager = dagworker.setup_sharding_manager = share_module
    if os.environ.get("PEER_TIMES"):
        global _step
        _step = dagworker.DAGWorker._run_training_step
        dagworker.DAGWorker._run_training_step = timed_step


_step = None


def timed_step(self, *args, **kwargs):
    """Is at the top of the module, because Ray pickles the class that has it."""
    wall, cpu = time.perf_counter(), time.process_time()
    metrics = _step(self, *args, **kwargs)
    times = {k.split("/")[-1]: float(v) for k, v in (metrics or {}).items() if k.startswith("perf/delta_time")}
    row = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "phases_s": times}
    with open(f"{os.environ['PEER_TIMES']}.{self._rank}", "a") as file:
        file.write(json.dumps(row) + "\n")
    return metrics


def grpo_without_reference():
    """Returns siiRL's own pipeline for GRPO without the node of the reference model."""
    from siirl.execution.dag.builtin_pipelines import NodeRole, NodeType, Pipeline

    nodes = [
        ("rollout_actor", "generate", NodeType.MODEL_INFERENCE, NodeRole.ROLLOUT),
        ("function_reward", "compute_reward", NodeType.COMPUTE, NodeRole.REWARD),
        ("calculate_advantages", "compute_advantage", NodeType.COMPUTE, NodeRole.ADVANTAGE),
        ("actor_old_log_prob", "compute_old_log_prob", NodeType.MODEL_TRAIN, NodeRole.ACTOR),
        ("actor_train", "train_actor", NodeType.MODEL_TRAIN, NodeRole.ACTOR),
    ]
    pipeline, before = Pipeline("grpo_without_reference", "GRPO without KL"), []
    for name, method, kind, role in nodes:
        forward = {"only_forward_compute": True} if name == "actor_old_log_prob" else {}
        pipeline.add_node(name, func=WORKER + method, deps=before, node_type=kind, node_role=role, **forward)
        before = [name]
    return pipeline.build()


def _rollout():
    import contextlib

    import torch
    from tensordict import TensorDict
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import GenerationConfig

    class HFRollout:
        def __init__(self, module, config):
            self.module, self.config = module, config.rollout

        @torch.no_grad()
        def generate_sequences(self, prompts, **_):
            ids, mask, places = (prompts[k] for k in ("input_ids", "attention_mask", "position_ids"))
            eos, pad = (getattr(prompts[k], "data", prompts[k]) for k in ("eos_token_id", "pad_token_id"))
            new = self.config.response_length
            how = GenerationConfig(
                do_sample=True,
                temperature=self.config.temperature,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=eos,
                pad_token_id=pad,
            )
            whole: contextlib.AbstractContextManager = contextlib.nullcontext()
            if isinstance(self.module, FullyShardedDataParallel):
                whole = FullyShardedDataParallel.summon_full_params(self.module, writeback=False, recurse=False)
            self.module.eval()
            with whole:
                ids_out = self.module.generate(input_ids=ids, attention_mask=mask, generation_config=how)
            self.module.train()
            responses = ids_out[:, ids.size(1) :]
            fields = {
                "prompts": ids,
                "responses": responses,
                "input_ids": ids_out,
                "attention_mask": torch.cat([mask, torch.ones_like(responses)], 1),
                "position_ids": torch.cat([places, places[:, -1:] + torch.arange(1, new + 1)[None]], 1),
            }
            return TensorDict(fields, batch_size=ids.size(0))

    return HFRollout
