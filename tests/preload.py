"""What tests' workers share: imported, loaded and compiled once, in the server that they are forks of."""

import gc
from copy import deepcopy

import pytest  # noqa: F401
import torch
import transformers.models.qwen2
import transformers.models.qwen3  # noqa: F401

import distflow.agents.converse
import distflow.checkpoint.model
import distflow.cli
import distflow.cluster.local
import distflow.flows.dapo
import distflow.flows.ppo
import distflow.reward.reward
import distflow.roles.actor
import distflow.roles.frozen
import distflow.roles.policy
import distflow.roles.second_model
import distflow.rollout.builtin.engine
import distflow.rollout.responses
import distflow.run.evaluation
import distflow.run.job
import distflow.run.process
import distflow.simulate.failures  # noqa: F401
from backward import go_back
from distflow.cpu.modules import use_cpu_modules
from distflow.model.attention import PackedAttention
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.engine import Request, SamplingParams
from distflow.train.logprobs import token_logprobs
from tiny import pair, side_by_side


def _generate() -> None:
    model = deepcopy(pair("qwen2").ours)
    generator = Generator(model, CacheLimits(1, 1 << 20, 4), torch.device("cpu"))
    for _ in range(2):
        for sample_id in range(2):
            generator.add_request(Request(sample_id, (3, 4), SamplingParams(2), 0))
        while generator.has_unfinished:
            generator.step()
        side_by_side(model)  # for the second time


def _train() -> None:
    model = deepcopy(pair("qwen2").ours).requires_grad_(True)
    use_cpu_modules(model)
    tokens = torch.arange(4)
    given = {"input_ids": tokens[None], "position_ids": tokens[None], "use_cache": False}
    hidden = model.base_model(**given, distflow=PackedAttention([4])).last_hidden_state[0]
    logprobs, entropy = token_logprobs(hidden, model.lm_head.weight, None, tokens)
    go_back((logprobs + entropy).sum())


torch.set_num_threads(1)  # a fork of a process with threads would wait for them
_generate()
_train()
pair.cache_clear()  # a test may want it of another size
gc.freeze()  # a collection in a fork would touch every page, and so copy it
