"""Mixtures of experts: our blocks compute what transformers' do, on weights from its files, and export to them."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.algo.kl import kl
from distflow.batch.batch import Batch, Column, Ragged
from distflow.config.schema import ModelConfig
from distflow.errors import ConfigError
from distflow.model.experts import PROMPT_EXPERTS, RESPONSE_EXPERTS, Routing, experts_blocks
from distflow.model.source import Source, open_model
from distflow.model.stored_names import read_stacked
from distflow.model.tokenizer import train_tokenizer
from distflow.rollout.engine import Request, SamplingParams
from distflow.rollout.responses import experts_columns
from distflow.train.heads import LogprobHead
from distflow.train.packing import pack
from rollout.plain_loop import complete, generator_for
from tiny import MIXTURES, VOCABULARY, config_of, pair


@cache
def tokenizer() -> object:
    return train_tokenizer(iter(["so it is"]), 0)


def source(folder: Path | None, arch: str) -> Source:
    return Source(arch, config_of(arch), tokenizer(), folder)  # type: ignore[arg-type]


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def filled(source: Source) -> PreTrainedModel:
    """Returns our model with the weights of the source, all read in two parts."""
    model = source.skeleton()
    read = source.reader({n: tuple(p.shape) for n, p in model.named_parameters()})
    model._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    model.tie_weights()
    for name, p in model.named_parameters():
        _, *rest = whole(tuple(p.shape))
        cut = 1 + len(p) // 3
        parts = read(name, (slice(0, cut), *rest)), read(name, (slice(cut, len(p)), *rest))
        p.data.copy_(torch.cat(parts))
        assert len(read(name, (slice(1, 1), *rest))) == 0  # a rank may have none
    return model


def logits(model: PreTrainedModel, rows: Tensor) -> Tensor:
    from distflow.model.attention import PackedAttention

    ours = {"distflow": PackedAttention([rows.shape[1]])} if experts_blocks(model) else {}
    return model(input_ids=rows, use_cache=False, **ours).logits[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in MIXTURES:
        pair(arch).eager.save_pretrained(folder / arch, max_shard_size="30KB")
    return folder


ROWS = torch.arange(1, 21)[None] * 7 % VOCABULARY


@pytest.mark.parametrize("arch", MIXTURES)
def test_our_blocks_compute_what_transformers_own_do(saved: Path, arch: str) -> None:
    model = filled(source(saved / arch, arch)).requires_grad_(True)
    plain = AutoModelForCausalLM.from_pretrained(saved / arch, attn_implementation="eager", dtype=torch.float32)
    ours, theirs = logits(model, ROWS), logits(plain, ROWS)
    assert torch.allclose(ours, theirs, atol=1e-5)
    for out in (ours, theirs):
        out.square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, p in plain.named_parameters():
        got = read_stacked(lambda n, part: grads[n][part], name, tuple(p.shape))
        assert p.grad is not None
        assert torch.allclose(got, p.grad, atol=1e-5 * float(p.grad.abs().max())), name


@pytest.mark.parametrize("arch", MIXTURES)
def test_files_may_have_the_experts_stacked(saved: Path, tmp_path: Path, arch: str) -> None:
    weights = {n: p.detach().clone() for n, p in pair(arch).eager.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    by_expert, stacked = (dict(filled(source(f, arch)).named_parameters()) for f in (saved / arch, tmp_path))
    assert all(torch.equal(by_expert[n], stacked[n]) for n in by_expert)


def test_a_missing_or_misshapen_expert_is_named(saved: Path, tmp_path: Path) -> None:
    for file in (saved / "qwen3_moe").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(tmp_path / places[name])
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / places[name], {"format": "pt"})
    with pytest.raises(ConfigError, match=r"experts\.3\.up_proj\.weight' in .* has the shape \[23, 32\]"):
        filled(source(tmp_path, "qwen3_moe"))


def test_random_weights_are_those_of_transformers() -> None:
    """Whatever a checkpoint is made of, it begins with the weights that transformers draws."""
    fresh = open_model(ModelConfig(arch="qwen3_moe", hidden=32, layers=1, heads=4, ffn=16), lambda: iter([]), Path(), 3)
    torch.manual_seed(3)
    plain = dict(AutoModelForCausalLM.from_config(fresh.config, dtype=torch.float32).named_parameters())
    assert fresh.config.num_experts == 8
    model = filled(fresh)
    parameters = dict(model.named_parameters())
    for name, p in plain.items():
        assert torch.equal(read_stacked(lambda n, part: parameters[n][part], name, tuple(p.shape)), p)


def test_bad_numbers_of_experts_are_refused() -> None:
    for given, error in (
        ({"arch": "qwen3", "experts": 4}, "`experts` and `experts_per_token` are of a small random model, with `arch`"),
        ({"path": "x", "experts_per_token": 4}, "are of a small random model"),
        ({"arch": "mixtral", "experts": 2, "experts_per_token": 3}, "3 is more than there are experts, 2"),
    ):
        with pytest.raises(ValueError, match=error):
            ModelConfig.model_validate(given)


def test_replayed_experts_are_used_and_their_gradient_reaches_the_router(saved: Path) -> None:
    model = filled(source(saved / "qwen3_moe", "qwen3_moe")).requires_grad_(True)
    blocks = experts_blocks(model)
    first = Routing(keeps=True)
    for block in blocks:
        block.routing = first
    plain = logits(model, ROWS)
    assert [tuple(c.shape) for c in first.chosen] == [(20, 2), (20, 2)]
    replay = torch.stack(first.chosen, 1)
    for given, same in ((replay, True), (torch.full_like(replay, -1), True), ((replay + 1) % 5, False)):
        again = Routing(True, given)
        for block in blocks:
            block.routing = again
        out = logits(model, ROWS)
        assert torch.allclose(out, plain, atol=1e-6) == same
        assert torch.equal(torch.stack(again.chosen, 1), given) == bool((given >= 0).all())
        assert torch.equal(again.own[0], first.own[0])
    out.square().mean().backward()
    assert all(block.gate.weight.grad.abs().sum() > 0 for block in blocks)


def flipped(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with routers that are off by about as much as rounding in 16 bits makes them."""
    other, noise = deepcopy(model), torch.Generator().manual_seed(5)
    for block in experts_blocks(other):
        block.gate.weight.data *= 1 + 0.005 * torch.randn(block.gate.weight.shape, generator=noise)
    return other


@pytest.mark.parametrize("arch", MIXTURES)
def test_replay_takes_the_mismatch_of_flipped_routers_away(saved: Path, arch: str) -> None:
    model = filled(source(saved / arch, arch)).eval().requires_grad_(False)
    noise = np.random.default_rng(4)
    prompts = [tuple(noise.integers(0, VOCABULARY, n).tolist()) for n in (4, 9, 1, 30)]
    params = SamplingParams(max_tokens=24, stop=frozenset(range(3)))
    requests = [Request(i, prompts[i % 4], params, 5) for i in range(16)]
    generator = generator_for(model, 5)
    generator.keeps_experts = True
    completions = complete(generator, requests)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.experts is not None
        assert completion.experts.shape == (len(request.prompt) + len(completion.tokens) - 1, 2, 2)
        assert completion.experts.dtype == np.int8
    columns: dict[str, Column] = {
        "prompt_tokens": Ragged.of([torch.tensor(r.prompt) for r in requests]),
        "response_tokens": Ragged.of([torch.from_numpy(c.tokens) for c in completions]),
        "rollout_logprobs": Ragged.of([torch.from_numpy(c.logprobs) for c in completions]),
        **experts_columns(completions),
    }
    plain = {f: c for f, c in columns.items() if f not in (PROMPT_EXPERTS, RESPONSE_EXPERTS)}

    def mismatch(model: PreTrainedModel, columns: dict[str, Column]) -> tuple[float, float]:
        """The divergence from the rollout, and the share of experts that the router itself would not choose."""
        packed, head = pack(Batch(np.arange(16), np.arange(16), columns), np.arange(16)), LogprobHead(model)
        with torch.enable_grad():
            ours = head(packed, 1.0)[0].detach()
        own, chosen = (torch.stack(x) for x in (head.routing.own, head.routing.chosen))
        differs = (chosen[..., None] != own[..., None, :]).all(-1).float().mean()
        return float(kl("k3", packed.per_token["rollout_logprobs"], ours).mean()), float(differs)

    assert mismatch(model, plain)[0] < 1e-9
    same = mismatch(model, columns)
    assert (same[0] < 1e-9, same[1]) == (True, 0)
    (before, _), (after, differs) = (mismatch(flipped(model), c) for c in (plain, columns))
    print(f"{arch}: routers differ in {differs:.1%} of choices, divergence {before:.2e} -> {after:.2e} with replay")
    assert differs > 0.001
    assert after < before / 2
