"""Vision-language models: what the trainer and the engine compute of prompts with images is what transformers does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distflow.batch.batch import Batch, Column, Ragged
from distflow.model.text import ragged
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.engine import Completion, Request, SamplingParams
from distflow.train.heads import LogprobHead
from distflow.train.packing import Rows, empty_pack, pack
from distflow.train.vision import Vision
from vision import ARCHITECTURES, QUESTION, TWO, Model, model, picture

PROMPTS: list[tuple[Any, list[str]]] = [
    (QUESTION, [picture(0)]),
    (TWO, [picture(1), picture(2, 1)]),
    (QUESTION, [picture(3)]),
    ("none?", []),
]
SAMPLES = [0, 1, 0, 2, 3, 1, 2]  # the prompt of each
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest) -> Model:
    return model(request.param)


def responses(m: Model) -> list[list[int]]:
    """Each of another length; one has a token that stands for an image in a prompt."""
    return [[5 + 7 * i + k for k in range(i % 3 + 1)] + [m.images.token] * (i == 2) + [9] for i in range(len(SAMPLES))]


def batch(m: Model, samples: list[int], answers: list[list[int]]) -> Batch:
    prompts = [m.text.encode(*PROMPTS[p]) for p in samples]
    index = np.arange(len(samples))
    columns: dict[str, Column] = {
        "prompt_tokens": ragged(prompts),
        "response_tokens": ragged(answers),
        "images": [PROMPTS[p][1] for p in samples],
    }
    return Batch(index, index, columns)


def alone(m: Model, prompt: int, answer: list[int]) -> torch.Tensor:
    """The log-probs of a response by transformers; a sampled token that stands for an image is read as the end."""
    tokens = [*m.text.encode(*PROMPTS[prompt])]
    read = [m.source.tokenizer.eos_token_id if t == m.images.token else t for t in answer]
    logits = m.alone([*tokens, *read], PROMPTS[prompt][1])[len(tokens) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_logprobs_of_a_pack_are_those_of_each_sequence_alone(tiny: Model) -> None:
    answers = responses(tiny)
    given = batch(tiny, SAMPLES, answers)
    packed = pack(given, np.arange(len(given)))
    whole = Vision(tiny.ours, tiny.images).complete(packed, Rows(given.select(packed.index)))
    assert len(whole.tokens) < sum(map(len, given["prompt_tokens"])), "prompts are there once"
    got = packed.model_tokens.spread(LogprobHead(tiny.ours)(whole, 1.0)[0])
    for i, part in zip(packed.index.tolist(), got, strict=True):
        torch.testing.assert_close(part, alone(tiny, SAMPLES[i], answers[i]), **CLOSE)


def test_a_pack_without_images_gets_a_small_one_and_the_same_logprobs(tiny: Model) -> None:
    vision, head = Vision(tiny.ours, tiny.images), LogprobHead(tiny.ours)
    answers = [[4, 5], [6, tiny.images.token, 8]]
    given = batch(tiny, [3, 3], answers)
    packed = pack(given, np.arange(2))
    whole = vision.complete(packed, Rows(given.select(packed.index)))
    assert whole.images
    for i, part in zip(packed.index.tolist(), packed.model_tokens.spread(head(whole, 1.0)[0]), strict=True):
        torch.testing.assert_close(part, alone(tiny, 3, answers[i]), **CLOSE)
    assert vision.with_smallest(empty_pack()).images
    assert len(head(vision.with_smallest(empty_pack()), 1.0)[0]) == 1


def test_prompts_with_the_same_tokens_and_other_images_are_two(tiny: Model) -> None:
    given = batch(tiny, [0, 2], [[4, 5], [4, 5]])
    assert (given["prompt_tokens"][0] == given["prompt_tokens"][1]).all()
    assert pack(given, np.arange(2)).shared is None


def test_an_engine_generates_what_transformers_would(tiny: Model) -> None:
    params = SamplingParams(max_tokens=6, temperature=0)
    engine = Generator(tiny.ours, CacheLimits(1, 4000, 8), torch.device("cpu"), images=tiny.images)
    for i, p in enumerate(SAMPLES):
        prompt, images = PROMPTS[p]
        engine.add_request(Request(i, tuple(tiny.text.encode(prompt, images)), params, 0, images=tuple(images)))
    done: dict[int, Completion] = {}
    while engine.has_unfinished:
        done |= {c.sample_id: c for c in engine.step()}
    for i, p in enumerate(SAMPLES):
        logprobs = alone(tiny, p, done[i].tokens.tolist())
        torch.testing.assert_close(torch.from_numpy(done[i].logprobs), logprobs, **CLOSE)
        sequence = [*tiny.text.encode(*PROMPTS[p]), int(done[i].tokens[0])]
        assert int(tiny.alone(sequence[:-1], PROMPTS[p][1])[-1].argmax()) == done[i].tokens[0]
    assert len({c.tokens.tobytes() for c in done.values()}) > 1


def test_gradients_of_the_tower_come_from_all_images(tiny: Model) -> None:
    given = batch(tiny, [0, 1], [[4, 5], [6, 7]])
    packed = pack(given, np.arange(2))
    tower = tiny.ours.get_encoder("image").requires_grad_(True)
    try:
        whole = Vision(tiny.ours, tiny.images).complete(packed, Rows(given.select(packed.index)))
        LogprobHead(tiny.ours)(whole, 1.0)[0].sum().backward()
        assert all(
            p.grad is not None and p.grad.abs().max() > 0 for n, p in tower.named_parameters() if "bias" not in n
        )
    finally:
        tower.requires_grad_(False)
        tower.zero_grad()
    assert isinstance(given["prompt_tokens"], Ragged)


def test_files_with_older_names_are_read_in_parts(tmp_path: Path) -> None:
    tiny = model("qwen2_5_vl")
    tiny.eager.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()  # as transformers writes them, too
    assert "visual.patch_embed.proj.weight" in names
    assert not any(name.startswith("model.language_model.") for name in names)
    source = replace(tiny.source, folder=tmp_path)
    shapes = {n: tuple(p.shape) for n, p in source.skeleton().named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source), "_whole", lambda self: pytest.fail("all weights were read at once"))
        read = source.reader(shapes)
    for name, shape in shapes.items():
        part = (slice(0, shape[0] // 2), *(slice(0, n) for n in shape[1:]))
        torch.testing.assert_close(read(name, part), tiny.eager.get_parameter(name)[part], atol=0, rtol=0)
