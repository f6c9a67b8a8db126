# mypy: ignore-errors
# ruff: noqa: E402
"""verl 0.5.0's worker on a CPU, for verl_step.py; Ray imports it in every worker."""

import os

import verl.utils.device
from cpu_device import replace_devices

replace_devices(verl.utils.device)

from omegaconf import OmegaConf
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout import hf_rollout


class _Fixed(hf_rollout.GenerationConfig):
    """Asks for responses of one length, once per row: the trainer has repeated the rows already."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs | {"num_return_sequences": 1, "min_new_tokens": int(os.environ["PEER_RESPONSE"])})


_init = hf_rollout.HFRollout.__init__


def _once(self, module, config):
    _init(self, module, OmegaConf.create(OmegaConf.to_container(config, resolve=True) | {"n": 1}))


hf_rollout.GenerationConfig, hf_rollout.HFRollout.__init__ = _Fixed, _once


class CpuWorker(ActorRolloutRefWorker):
    """Lives in this module, so that unpickling it in a worker imports all of the above."""
