"""Over random conversations, the tokens trained on are those sampled plus those of the environment, exactly."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig

from agents.families import FAMILIES, decoded, tokenizer
from agents.random_conversations import Message, Played, play, scripted
from distflow.agents.session import Branch
from distflow.agents.token_tree import token_tree
from distflow.batch.batch import Batch, Ragged
from distflow.batch.branches import branches_column
from distflow.config.schema import RolloutConfig, TrainConfig
from distflow.model.source import Source
from distflow.plan.layout import Layout
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import EngineSetup, Request, SamplingParams
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions

CONVERSATIONS = 1000


def frame(family: str, messages: Sequence[Message], cut: bool) -> Iterator[tuple[str, str]]:
    """What stands between two turns, by hand: pairs of the template's own text and of a message's."""
    user, tool, end = {
        "qwen": (("<|im_start|>user\n", "<|im_end|>\n"), ("\n<tool_response>\n", "\n</tool_response>"), "<|im_end|>"),
        "hermes": (
            ("<|im_start|>user\n", "<|im_end|>\n"),
            ("<|im_start|>tool\n<tool_response>\n", "\n</tool_response><|im_end|>\n"),
            "<|im_end|>",
        ),
        "llama": (
            ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
            ("<|start_header_id|>ipython<|end_header_id|>\n\n", "<|eot_id|>"),
            "<|eot_id|>",
        ),
        "mistral": (("[INST] ", "[/INST]"), ('[TOOL_RESULTS] {"content": ', "[/TOOL_RESULTS]"), "</s>"),
    }[family]
    yield end if cut else "", ""
    yield "\n" if family in ("qwen", "hermes") else "", ""
    for role, group in groupby(messages, lambda m: m["role"]):
        if family == "qwen" and role == "tool":
            yield "<|im_start|>user", ""
        for m in group:
            before, after = user if role == "user" else tool
            content = m["content"].strip() if (family, role) == ("llama", "user") else m["content"]
            if (family, role) == ("mistral", "tool"):
                content = json.dumps(content, ensure_ascii=False)
                after = f', "call_id": "{m["tool_call_id"]}"}}{after}' if "tool_call_id" in m else after
            yield before, content
            yield after, ""
        if family == "qwen" and role == "tool":
            yield "<|im_end|>\n", ""
    prompts = {"llama": "<|start_header_id|>assistant<|end_header_id|>\n\n", "mistral": ""}
    yield prompts.get(family, "<|im_start|>assistant\n"), ""


def check_account(played: Played) -> None:
    """Every branch holds what the model was given and what it sampled, in their order, and nothing else."""
    session = played.session
    for branch in session.branches:
        own = [(request, reply) for b, request, reply in played.generations if b is branch]
        turns = branch.turns[len(branch.turns) - len(own) :]  # a fork has those of its origin before
        for turn, (request, (tokens, logprobs, finished)) in zip(turns, own, strict=True):
            end = turn.start + turn.length
            assert (*branch.prompt, *branch.tokens[: turn.start]) == request.prompt
            assert branch.tokens[turn.start : end] == tokens
            assert branch.logprobs[turn.start : end] == logprobs
            assert turn.finished == finished
        spans = [range(t.start, t.start + t.length) for t in branch.turns]
        assert [i for i, s in enumerate(branch.mask) if s] == [i for span in spans for i in span]
        assert not any(p for p, s in zip(branch.logprobs, branch.mask, strict=True) if not s)
        assert len(branch.tokens) == len(branch.mask) == len(branch.logprobs) <= session.limits.max_tokens
    assert len(played.generations) <= session.limits.max_turns
    positions = [p for _, r, (tokens, *_) in played.generations for p in range(r.position, r.position + len(tokens))]
    assert len(set(positions)) == len(positions)


def check_forks(played: Played) -> None:
    """What a fork shares with its origin was sampled there."""
    sampled = [(list(r.prompt), reply[0], reply[1]) for _, r, reply in played.generations]
    for branch in played.session.branches:
        for turn in branch.turns:
            end = turn.start + turn.length
            seen = (branch.prompt + branch.tokens[: turn.start], branch.tokens[turn.start : end])
            assert (*seen, branch.logprobs[turn.start : end]) in sampled


def check_said(played: Played, branch: Branch) -> None:
    """Between the turns stands what the template writes around the messages, which forge none of its tokens."""
    made, family = tokenizer(played.family), played.family
    gaps = zip(branch.turns, branch.turns[1:], strict=False)
    said = [branch.tokens[a.start + a.length : b.start] for a, b in gaps]
    for tokens, (messages, cut) in zip(said, played.said, strict=False):
        parts = list(frame(family, messages, cut))
        if family != "mistral" or all("tool_call_id" in m or m["role"] == "user" for m in messages):
            assert decoded(family, tokens) == "".join(a + b for a, b in parts)
        own = made("".join(a for a, _ in parts), add_special_tokens=False)["input_ids"]
        special = set(made.all_special_ids)
        assert [t for t in tokens if t in special] == [t for t in own if t in special]


def test_the_tokens_are_those_sampled_and_those_of_the_environment() -> None:
    calls = errors = forks = refused = said = 0
    for seed in range(CONVERSATIONS):
        played, playing = play(seed)
        model = scripted(seed, played.family)
        try:
            request = next(playing)
            while True:
                request = playing.send(model(request))
        except StopIteration:
            pass
        check_account(played)
        check_forks(played)
        if played.said:
            check_said(played, played.session.branches[0])
        calls, errors, forks = calls + played.calls, errors + played.errors, forks + played.forks
        refused, said = refused + played.refused, said + len(played.said)
    assert min(calls, errors, forks, said) > CONVERSATIONS / 10  # all of it happened
    assert refused < CONVERSATIONS / 10


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A process group of one, which shares the cores with others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def model_for(family: str) -> Source:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer(family)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer(family).eos_token_id,
    )
    return Source(family, config, tokenizer(family))


@pytest.mark.parametrize("family", FAMILIES[:4])
@pytest.mark.parametrize("count", [15, pytest.param(250, marks=pytest.mark.slow)])
def test_the_log_probs_of_the_engine_are_those_of_the_trainer(mesh: DeviceMesh, family: str, count: int) -> None:
    """Real generation, all conversations at once, in one engine; their log-probs as the trainer computes them."""
    layout, source = Layout((0,), 1), model_for(family)
    trainer = Trainer("actor", source, RankMesh(layout, mesh, 0), TrainerOptions(TrainConfig(micro_tokens=20_000)))
    rollout = RolloutConfig.model_validate({"kv_cache_gb": 0.25, "max_sequences": 64})
    setup = EngineSetup(source, layout, mesh, 0, rollout, torch.float32, torch.device("cpu"), 1000)
    engine = BuiltinEngine(setup)
    for name, target in engine.weight_targets().items():
        target.copy_(trainer.weights()[name])
    engine.commit_weights(1)
    params = SamplingParams(max_tokens=300, stop=frozenset({tokenizer(family).eos_token_id}))
    games = [play(seed, [family], max_tokens=300) for seed in range(count)]
    reused = 0
    with engine.serving(count, 1000):
        for i, (_, playing) in enumerate(games):
            _ask(engine, params, i, next(playing))
        while engine.has_unfinished:
            for done in engine.step():
                reused += done.reused
                try:
                    reply = (done.tokens.tolist(), done.logprobs.tolist(), done.finished)
                    _ask(engine, params, done.sample_id, games[done.sample_id][1].send(reply))
                except StopIteration:
                    engine.forget([done.sample_id])
    assert reused
    trees = []
    for played, _ in games:
        check_account(played)
        check_forks(played)
        trees.append(token_tree(played.session.sampled_branches()))
        sampled = sum(len(reply[0]) for _, _, reply in played.generations)
        assert sum(trees[-1].mask) == sampled  # every token once, whatever the branches share
    assert sum(len(played.generations) > 1 for played, _ in games) > count / 4
    assert any(t.branches for t in trees)
    batch = Batch(
        np.arange(count),
        np.arange(count),
        {
            "prompt_tokens": Ragged.of([torch.tensor(t.prompt) for t in trees]),
            "response_tokens": Ragged.of([torch.tensor(t.tokens) for t in trees]),
            "response_mask": Ragged.of([torch.tensor(t.mask, dtype=torch.int8) for t in trees]),
            "response_branches": branches_column([t.branches for t in trees]),
        },
    )
    trained = trainer.infer(batch)
    worst = max(float((ours - torch.tensor(t.logprobs)).abs().max()) for ours, t in zip(trained, trees, strict=True))
    print(f"{family}: {count} conversations, {sum(len(p.generations) for p, _ in games)} turns, off by {worst:.1e}")
    assert worst < 1e-4


def _ask(engine: BuiltinEngine, params: SamplingParams, sample: int, request: Any) -> None:
    room = request.max_tokens
    engine.add_request(Request(sample, request.prompt, params, 5, request.position, max_tokens=room, keep=True))
