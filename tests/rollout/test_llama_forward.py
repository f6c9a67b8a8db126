"""The forward passes of a rollout engine give what a model's own modules give; what fits the model is chosen."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.cpu.llama_forward import CpuLlamaForward
from distflow.model import attention
from distflow.model.attention import PackedAttention
from distflow.model.llama_family import FAMILY, fused_weights, projections
from distflow.rollout.builtin.forward import ModuleForward, forward_for
from distflow.rollout.builtin.llama_forward import LlamaForward
from rollout.plain_loop import expected, generate, generator_for, same
from tiny import ARCHITECTURES, VOCABULARY, config_of, pair, randomize_weights, side_by_side

FASTEST: dict[str, type] = {"kernels": CpuLlamaForward, "torch": LlamaForward}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 64])  # an output layer of 64 rows fits the kernels
def test_a_forward_pass_gives_what_the_modules_give(arch: str, vocabulary: int, backend: str) -> None:
    config = config_of(arch, vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    randomize_weights(model)
    before = deepcopy(model.state_dict())
    lengths = [9, 9, 4, 1]
    tokens, positions = torch.arange(3, 26), torch.cat([torch.arange(n) for n in lengths])
    for keep in (None, torch.tensor([8, 17, 21, 22])):
        with torch.inference_mode():
            want = ModuleForward(model)(tokens, positions, PackedAttention(lengths), keep)
            forward = forward_for(model)
            assert isinstance(forward, FASTEST[backend] if arch in FAMILY else ModuleForward)
            with forward.packed_weights():
                got = forward(tokens, positions, PackedAttention(lengths), keep)
        assert got.shape == want.shape == (4 if keep is not None else 23, vocabulary)
        assert torch.allclose(got, want, atol=3e-5)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_model_that_is_not_quite_of_the_family_runs_by_its_modules_if_these_have_kernels(backend: str) -> None:
    def choice(**changes: Any) -> type:
        return type(forward_for(AutoModelForCausalLM.from_config(config_of("llama", **changes), dtype=torch.float32)))

    assert choice() is FASTEST[backend]
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert choice(intermediate_size=50) is FASTEST[backend]
    for changes in ({"hidden_act": "gelu"}, {"rope_parameters": scaled}):
        assert choice(**changes) is (ModuleForward if backend == "kernels" else LlamaForward), changes


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3", "mistral"])
def test_matrices_side_by_side_are_one(arch: str, backend: str) -> None:
    model = deepcopy(pair(arch).ours)
    side_by_side(model)
    layer = LlamaForward(model).layers[1]
    qkv, _, gate_up, _ = projections(model.model.layers[1])
    for fused, parts in ((layer.qkv, qkv), (layer.gate_up, gate_up)):
        assert fused.weight is not None
        assert torch.equal(fused.weight, torch.cat([p.weight for p in parts]))
        assert fused.weight.data_ptr() == parts[0].weight.data_ptr()  # no copy
        assert fused.weight.is_contiguous() == (backend == "kernels")  # transposed otherwise
    assert LlamaForward(pair(arch).ours).layers[1].qkv.weight is None
    assert same(generate(generator_for(model, 8)), expected(arch))


def test_weights_of_other_architectures_are_not_fused() -> None:
    assert list(fused_weights(pair("gemma2").ours)) == []


@pytest.mark.usefixtures("one_thread")
def test_packed_weights_are_unpacked_after_a_failure() -> None:
    model = deepcopy(pair("llama").ours)
    before, forward = deepcopy(model.state_dict()), forward_for(model)
    assert isinstance(forward, CpuLlamaForward)

    def fail() -> None:
        with forward.packed_weights():
            assert not all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
