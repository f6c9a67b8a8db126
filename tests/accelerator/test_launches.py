"""Budgets of kernels: each launch costs the host microseconds, in which a fast device has nothing to do."""

import numpy as np
import pytest
import torch

from distflow.batch.batch import Batch, Ragged
from distflow.config.model_shape import ModelShape, load_model
from distflow.device.sizes import ACCELERATOR
from distflow.rehearsal.launches import META, DecodingStep, Launches, model_of
from distflow.rollout.engine import SamplingParams
from distflow.rollout.sampling import sample
from distflow.train.heads import LogprobHead
from distflow.train.packing import Pack, pack
from distflow.weights.checksums import checksum

VOCABULARY = 152064
LAYERS = 4  # all are alike
SIZES = ("0.5b", "7b", "72b")


def shape_of(size: str) -> ModelShape:
    return load_model(f"qwen2.5-{size}").model_copy(update={"layers": LAYERS})


@pytest.mark.parametrize("sequences", [1, 32, 256])
@pytest.mark.parametrize(
    "params", [SamplingParams(10), SamplingParams(10, temperature=0.7, top_p=0.9, top_k=50)], ids=str
)
def test_tokens_are_sampled_in_a_few_kernels(sequences: int, params: SamplingParams) -> None:
    logits = torch.empty(sequences, VOCABULARY, device=META, dtype=torch.bfloat16)
    numbers = np.arange(sequences)
    sample(logits, params, 0, numbers, numbers)  # the bits of the vocabulary are made once
    with Launches() as launches:
        sample(logits, params, 0, numbers, numbers)
    assert launches.total < 40 + 20 * params.truncated, launches.kernels


def micro_batch(samples: int, lengths: int) -> Pack:
    """Returns samples of four prompts, with responses of so many different lengths."""
    groups, tokens = np.arange(samples) // (samples // 4), torch.arange(2000)
    columns = {
        "prompt_tokens": Ragged.of([tokens[: 100 + g] for g in groups]),
        "response_tokens": Ragged.of([tokens[: 200 + i % lengths] for i in range(samples)]),
    }
    return pack(Batch(np.arange(samples), groups, columns), np.arange(samples))


def launches_of_update(size: str, packed: Pack) -> Launches:
    """Counts the forward and the backward pass of a model with some of the layers."""
    model = model_of(shape_of(size))
    with Launches() as launches:
        LogprobHead(model)(packed.to(META), 0.7)[0].sum().backward()
    return launches


@pytest.mark.parametrize("size", SIZES)
def test_the_kernels_of_a_micro_batch_do_not_depend_on_its_samples(size: str) -> None:
    """Nor does the host read anything of a device, which a tensor without memory refuses."""
    few, many = (launches_of_update(size, micro_batch(*shape)) for shape in ((8, 1), (64, 64)))
    assert many.kernels["torch_attn::_varlen_attn_backward"] == LAYERS
    chunks = 9  # of logits, of 1 GiB each
    assert chunks == -(-len(micro_batch(64, 64).targets) // (ACCELERATOR.logits // VOCABULARY))
    assert few.total < 140 * LAYERS + 100
    assert many.total < few.total + 40 * chunks


@pytest.mark.parametrize("size", SIZES)
def test_a_decoding_step_takes_a_few_kernels_per_layer(size: str) -> None:
    few, many = (DecodingStep(shape_of(size), *of).launches() for of in ((1, 300), (256, 4000)))
    assert many.kernels["aten::_flash_attention_forward"] == LAYERS
    assert few.total == many.total <= 13 * LAYERS + 30, many.kernels


def test_a_decoding_step_of_7b_takes_less_than_400_kernels() -> None:
    assert DecodingStep(load_model("qwen2.5-7b"), 256, 1024).launches().total < 400


def test_weights_are_checked_in_a_few_kernels_each() -> None:
    shape, one = load_model("qwen2.5-7b"), 0
    for size in ((shape.ffn, shape.hidden), (shape.vocab, shape.hidden)):
        weight = torch.empty(size, device=META, dtype=torch.bfloat16)
        with Launches() as launches:
            checksum(weight, tuple((0, n) for n in size))
        one = max(one, launches.total)
    assert one < 100, launches.kernels
