"""A fact many tokens back, learned by a model that two ranks divide: accuracy before and after.

    python bench/recall.py
    python bench/recall.py --tokens 4096 --steps 20

A prompt begins with a fact for each of eight names, a token that says name and value; then come as many tokens of noise
as make the context, and each response asks for the value of one name. All responses share their prompt. The model, with
random weights, learns on contexts of 64 tokens first; then it meets the long ones, on which it is measured before and
after it is trained on them. The facts are in the rows of the first rank, the questions in those of the second: what is
recalled has crossed the exchange of sequence parallelism. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from distflow.algo.losses import nll
from distflow.batch.batch import Batch, Ragged
from distflow.batch.context import Context
from distflow.config.schema import TrainConfig
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout
from distflow.train.heads import TopK
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from distflow.train.update_spec import UpdateSpec
from spawn import spawn

NAMES, VALUES, NOISE = 8, 8, 32
FACTS, QUESTIONS, ANSWERS = 0, NAMES * VALUES, NAMES * VALUES + NAMES  # where the kinds of tokens begin
VOCABULARY = ANSWERS + VALUES + NOISE
SHORT, CONTEXTS = 64, 16  # tokens of the contexts that are learned first, and how many a step has
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}


def contexts(count: int, tokens: int, seed: int) -> Batch:
    """Returns a batch of so many contexts, with a question about each name."""
    draw = np.random.default_rng(seed)
    prompts, responses = [], []
    for _ in range(count):
        values = draw.integers(0, VALUES, NAMES)
        facts = draw.permutation(FACTS + np.arange(NAMES) * VALUES + values)
        noise = draw.integers(ANSWERS + VALUES, VOCABULARY, tokens - NAMES)
        prompt = torch.from_numpy(np.concatenate([facts, noise]))
        prompts += [prompt] * NAMES
        responses += [torch.tensor([QUESTIONS + name, ANSWERS + int(values[name])]) for name in range(NAMES)]
    rows = np.arange(count * NAMES)
    columns: dict[str, Any] = {
        "prompt_tokens": Ragged.of(prompts),
        "response_tokens": Ragged.of(responses),
        "response_mask": Ragged.of([torch.tensor([0, 1], dtype=torch.int8)] * len(rows)),
    }
    return Batch(rows, rows // NAMES, columns)


def accuracy(trainer: Trainer, batch: Batch) -> float:
    likeliest, _ = trainer.infer_top(batch, TopK(1, VOCABULARY))
    answers = [int(response[-1]) for response in batch["response_tokens"]]
    return sum(int(top[-1, 0]) == answer for top, answer in zip(likeliest, answers, strict=True)) / len(answers)


def learn(rank: int, sp: int, folder: Path, tokens: int, short_steps: int, steps: int) -> dict[str, float]:
    layout = Layout(tuple(range(sp)), 1, 1, sp)
    mesh = DeviceMesh("cpu", torch.arange(sp).view(sp, 1), mesh_dim_names=("dp", "tp"))
    source = Source("recall", AutoConfig.for_model("qwen2", **SHAPE), train_tokenizer(iter(["a b"]), 0), folder)
    group = mesh.get_group("dp") if sp > 1 else None
    config = TrainConfig(lr=5e-3, weight_decay=0.0, warmup=5, micro_tokens=CONTEXTS * (SHORT + NAMES))
    trainer = Trainer("actor", source, RankMesh(layout, mesh, rank, group), TrainerOptions(config))
    spec = UpdateSpec(nll, {}, "token-mean", 2, short_steps + steps)
    held_out = {length: contexts(4, length, 10**6) for length in (SHORT, tokens)}
    times = {}

    def train(count: int, each: int, length: int) -> None:
        start = time.perf_counter()
        for step in range(count):
            ctx = Context(step, rank, sp, layout, 0, StepMetrics(), folder, np.arange(each * NAMES))
            trainer.update(contexts(each, length, length + step), spec, ctx)
        times[length] = round(time.perf_counter() - start, 1)

    train(short_steps, CONTEXTS, SHORT)
    short, before = (accuracy(trainer, held_out[length]) for length in (SHORT, tokens))
    train(steps, 1, tokens)
    right = {"accuracy_short": short, "accuracy_before": before, "accuracy_after": accuracy(trainer, held_out[tokens])}
    return right | {"seconds_short": times[SHORT], "seconds_long": times[tokens]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=40, help="on one long context each")
    parser.add_argument("--short-steps", type=int, default=200, help=f"before, on {CONTEXTS} short contexts each")
    parser.add_argument("--sp", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SHAPE)).save_pretrained(name)
        what = given.sp, Path(name), given.tokens, given.short_steps, given.steps
        first, *_ = spawn(given.sp, learn, *what, timeout_s=900)
    print(f"right about {NAMES} facts, {given.tokens:,} tokens back, by chance {1 / VALUES:.0%}, sp {given.sp}:")
    print(f"  {first['accuracy_before']:.0%} after contexts of {SHORT} ({first['accuracy_short']:.0%} on such),")
    print(f"  {first['accuracy_after']:.0%} after {given.steps} long ones")
    print(json.dumps({"tokens": given.tokens, "sp": given.sp, **first}))


if __name__ == "__main__":
    main()
