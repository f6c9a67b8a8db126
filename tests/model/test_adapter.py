"""A LoRA adapter: which layers it adapts, and initial weights that are the same in any shard."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from distflow.config.schema import LoraConfig
from distflow.errors import ConfigError
from distflow.model.lora import LoraAdapter
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from tiny import config_of

TOKENIZER = train_tokenizer(iter(["a text"]), 0)


@pytest.mark.parametrize(
    ("arch", "names"),
    [("gpt_neox", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}), ("gpt2", set())],
)
def test_all_linear_means_all_but_the_output_layer(arch: str, names: set[str]) -> None:
    config = AutoConfig.for_model(arch, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    skeleton = Source(arch, config, TOKENIZER).skeleton()
    if names:
        assert {spec.name.split(".")[-4] for spec in LoraAdapter(skeleton, LoraConfig()).specs} == names
    else:
        with pytest.raises(ConfigError, match=f"a {arch} model has no nn.Linear layers; leave it out"):
            LoraAdapter(skeleton, LoraConfig())


def test_initial_weights_do_not_depend_on_the_shard() -> None:
    """B is 0; A is drawn as PEFT does, each with noise of its own."""
    adapter = LoraAdapter(Source("qwen2", config_of("qwen2"), TOKENIZER).skeleton(), LoraConfig(rank=64))

    def initial_weights(seed: int) -> dict[str, Tensor]:
        read = adapter.initial_weights(seed)
        return {s.name: read(s.name, tuple(map(slice, s.shape))) for s in adapter.specs}

    weights, read = initial_weights(0), adapter.initial_weights(0)
    for spec in adapter.specs:
        whole = weights[spec.name]
        assert torch.equal(read(spec.name, (slice(3, 9), slice(2, 5))), whole[3:9, 2:5])
        if ".lora_B." in spec.name:
            assert not whole.any()
        else:
            bound = spec.shape[1] ** -0.5
            assert 0.95 * bound < float(whole.abs().max()) <= bound
            assert torch.equal(initial_weights(0)[spec.name], whole)
            assert not torch.equal(initial_weights(1)[spec.name], whole)
    matrices = [w for name, w in weights.items() if ".lora_A." in name and w.shape[1] == 32]
    assert len({float(w[0, 0]) for w in matrices}) == len(matrices)
