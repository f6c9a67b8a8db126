"""vLLM with images: it computes what transformers does of them, and runs are those of the built-in engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm`")

from distflow.config.schema import RolloutConfig
from distflow.plan.layout import Layout
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import Completion, EngineSetup, Request, RolloutEngine, SamplingParams
from distflow.rollout.responses import complete
from distflow.rollout.vllm import sampler
from distflow.rollout.vllm.engine import VllmEngine
from distributed.test_vision_runs import CURVES, SMALL, SPLIT, folder, metrics, run
from spawn import spawn
from vision import ARCHITECTURES, QUESTION, TWO, Model, model, picture

__all__ = ["folder"]
CONFIG = RolloutConfig(engine="vllm", kv_cache_gb=0.05, max_sequences=8)
PARAMS = SamplingParams(10)
PROMPTS: tuple[tuple[Any, list[str]], ...] = (
    (QUESTION, [picture(0)]),
    (TWO, [picture(1), picture(1, 1)]),
    (QUESTION, [picture(2)]),
    ("No picture?", []),
)


def requests(of: Model) -> list[Request]:
    """Returns two requests for each prompt."""
    prompts = [(tuple(of.text.encode(text, images)), tuple(images)) for text, images in PROMPTS]
    return [Request(i, prompts[i // 2][0], PARAMS, 5, images=prompts[i // 2][1]) for i in range(2 * len(prompts))]


def fill(engine: RolloutEngine, tensors: dict[str, Tensor], version: int) -> None:
    targets = engine.weight_targets()
    assert targets.keys() == tensors.keys()
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)
    engine.commit_weights(version)


def is_what_transformers_computes(of: Model, request: Request, completion: Completion) -> None:
    """Also where a token of an image was sampled, which is read as the end of the sequence."""
    tokens = torch.from_numpy(completion.tokens)
    logits = of.alone([*request.prompt, *of.images.as_read(tokens).tolist()], request.images)[len(request.prompt) - 1 :]
    wanted = logits[: len(tokens)].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert completion.logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


def sees(rank: int, arch: str) -> None:
    of, layout = model(arch), Layout((0,), 1)
    mesh = DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("dp", "tp"))
    setup = EngineSetup(of.source, layout, mesh, 0, CONFIG, torch.float32, torch.device("cpu"), 200, images=of.images)
    engine, builtin = VllmEngine(setup), BuiltinEngine(setup)
    for version, scale in enumerate((1.0, 0.5)):  # of the vision tower, whose weights are synced like any
        with torch.no_grad():
            for p in of.eager.get_encoder("image").parameters():
                p.mul_(scale)
        tensors = {name: p.detach() for name, p in of.eager.named_parameters()}
        fill(engine, tensors, version)
        fill(builtin, tensors, version)
        assert all(torch.equal(engine.held_weights()[name], t) for name, t in tensors.items())
        got, wanted = complete(engine, requests(of)), complete(builtin, requests(of))
        for request in requests(of):
            is_what_transformers_computes(of, request, got[request.sample_id])
            assert got[request.sample_id].tokens.tolist() == wanted[request.sample_id].tokens.tolist()
    image = of.images.token

    def sample(logits: Tensor, params: Any, seed: int, ids: Any, positions: Any, seen: Any) -> tuple[Tensor, Tensor]:
        tokens = torch.where(torch.from_numpy(positions) % 3 == 0, image, logits.argmax(-1))
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    with patch.object(sampler, "sample", sample):
        for request in requests(of):
            [completion] = complete(engine, [replace(request, params=replace(PARAMS, stop=frozenset()))]).values()
            assert completion.tokens.tolist()[::3] == [image] * 4
            is_what_transformers_computes(of, request, completion)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_computes_what_transformers_does(arch: str) -> None:
    spawn(1, sees, arch)


def test_a_run_is_that_of_the_built_in_engine(folder: Path) -> None:
    shape = SMALL | {"hidden": 128}
    for engine in ("vllm", "builtin"):
        rollout = {"n": 4, "max_tokens": 8, "verify_every": 1, "engine": engine, "kv_cache_gb": 0.05}
        model = {"arch": "qwen2_5_vl", **shape}
        run(folder, engine, 2, rollout=rollout, model=model, placement=SPLIT, steps=3)
    for ours, theirs in zip(metrics(folder, "vllm"), metrics(folder, "builtin"), strict=True):
        for curve in CURVES:
            assert ours[curve] == pytest.approx(theirs[curve], rel=1e-3, abs=1e-5), (curve, ours["step"])
