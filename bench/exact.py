"""Log-probs of a rollout beside those of the trainer for the same tokens and weights: how many differ in any bit.

    python bench/exact.py [--only qwen2,mixtral] [--threads 1,2] [--vllm PYTHON]

Every architecture with random weights (hidden 256, 4 layers, vocabulary 1003), on the CPU in float32. The built-in
engine generates with 64 slots and with 3, in one batch and in two, in one turn and in three that keep their keys and
values, greedily and truncated, with an adapter and without; the trainer computes the same tokens in micro-batches of
one sample, of 700 tokens and of all.

Beside it what others do: Hugging Face's `generate` against a forward pass over padded sequences, as TRL computes
log-probs without vLLM, and with --vllm (a Python that has it) vLLM against such a pass. The last line is one JSON
object.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from distflow.batch.batch import Batch, Ragged
from distflow.config.schema import LoraConfig
from distflow.cpu.modules import use_cpu_modules
from distflow.model import attention
from distflow.model.experts import use_experts_blocks
from distflow.model.lora import LoraAdapter, adapter_pairs, merge
from distflow.model.source import kv_bytes
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.engine import Completion, Request, SamplingParams
from distflow.train.heads import LogprobHead
from distflow.train.packing import micro_batches, pack

VOCAB, RESPONSE, SEED = 1003, 40, 5
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
SHAPE |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
MORE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 40},
    "mistral": {"sliding_window": 33},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": 33, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 88, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
PLAIN = SamplingParams(RESPONSE)
TRUNCATED = SamplingParams(RESPONSE, 0.7, top_p=0.9, top_k=50, repetition_penalty=1.1)


@dataclass(frozen=True)
class Way:
    """How responses are generated."""

    slots: int = 64
    batches: int = 1
    turns: int = 1
    sampling: SamplingParams = PLAIN


WAYS = {
    "64 slots": Way(),
    "3 slots": Way(3),
    "2 batches": Way(batches=2),
    "3 turns": Way(turns=3),
    "greedy": Way(sampling=SamplingParams(RESPONSE, temperature=0)),
    "truncated": Way(5, 2, 2, TRUNCATED),
}
BUDGETS = (1, 700, 1 << 14)


@dataclass
class Turn:
    """A response and the log-probs that it was generated with."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Count:
    """Tokens whose two log-probs were compared."""

    tokens: int = 0
    differ: int = 0
    largest: float = 0.0
    where: list[str] = field(default_factory=list)

    def add(self, theirs: list[float], ours: list[float], what: str = "") -> None:
        gap = np.abs(np.array(theirs, np.float32) - np.array(ours, np.float32))
        self.tokens, self.differ = self.tokens + len(gap), self.differ + int(np.count_nonzero(gap))
        self.largest = max(self.largest, float(gap.max(initial=0)))
        if gap.any() and what and what not in self.where:
            self.where.append(what)

    def row(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "differ": self.differ, "max": self.largest} | (
            {"where": self.where} if self.where else {}
        )


def config_of(arch: str) -> Any:
    return AutoConfig.for_model(arch, **{**SHAPE, **MORE[arch]})


def plain_model(arch: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config_of(arch), attn_implementation=implementation, dtype=torch.float32)
    for p in model.parameters():
        if p.ndim > 1:  # with the initial ones, every token would be about as likely
            p.data *= 3
    return model.eval().requires_grad_(False)


def our_model(arch: str) -> PreTrainedModel:
    model = plain_model(arch, attention.NAME)
    use_experts_blocks(model)
    noise = torch.Generator().manual_seed(SEED)
    for name, p in model.named_parameters():
        if ".experts." in name:
            p.data = torch.randn(p.shape, generator=noise) * 0.06
    use_cpu_modules(model)
    return model


def with_adapter(arch: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a policy with the merged adapter, and the model under training that has it apart."""
    policy, trained = our_model(arch), our_model(arch)
    adapter = LoraAdapter(trained, LoraConfig(rank=8))
    noise = torch.Generator().manual_seed(SEED)
    for spec in adapter.specs:
        layer = trained.get_submodule(spec.name.removesuffix(".weight"))
        layer.weight = torch.nn.Parameter(torch.randn(spec.shape, generator=noise) * 0.05)
    for name, pair in adapter_pairs(dict(trained.named_parameters())).items():
        weight = policy.get_parameter(name)
        weight.data = merge(weight, pair, adapter.scale)
    return policy, trained


def prompts_of(count: int) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(0)
    return [tuple(draw.integers(1, VOCAB, n).tolist()) for n in (300, 1, 17, 40, 5, 256)] * count


def rollout(model: PreTrainedModel, way: Way) -> list[Turn]:
    limits = CacheLimits(kv_bytes(model.config, torch.float32, 1), 1 << 28, way.slots)
    generator = Generator(model, limits, torch.device("cpu"), max_batches=way.batches)
    prompts, turns = prompts_of(3), list[Turn]()
    with generator.serving(len(prompts), 800) if way.turns > 1 else nullcontext():
        for turn in range(way.turns):
            done: dict[int, Completion] = {}
            for i, prompt in enumerate(prompts):
                generator.add_request(Request(i, prompt, way.sampling, SEED + turn, keep=way.turns > 1))
            while generator.has_unfinished:
                done |= {c.sample_id: c for c in generator.step()}
            turns += [Turn(p, done[i].tokens.tolist(), done[i].logprobs.tolist()) for i, p in enumerate(prompts)]
            prompts = [(*p, *done[i].tokens.tolist(), 7, 8 + i) for i, p in enumerate(prompts)]
    return turns


def trained_logprobs(model: PreTrainedModel, turns: list[Turn], budget: int, temperature: float) -> list[list[float]]:
    prompts, tokens = (
        Ragged.of(list(map(torch.tensor, xs))) for xs in zip(*((t.prompt, t.tokens) for t in turns), strict=True)
    )
    ids, head = np.arange(len(turns)), LogprobHead(model)
    batch = Batch(ids, ids, {"prompt_tokens": prompts, "response_tokens": tokens})
    result: list[list[float]] = [[] for _ in turns]
    for index in micro_batches(batch, ids, budget):
        packed = pack(batch, index)
        logprobs = head(packed, temperature)[0]
        for i, part in zip(packed.index, packed.model_tokens.spread(logprobs), strict=True):
            result[i] = part.tolist()
    return result


def ours(arch: str, threads: int) -> Iterator[tuple[str, Count]]:
    torch.set_num_threads(threads)
    model = our_model(arch)
    cases = [(name, way, model, model) for name, way in WAYS.items()]
    cases.append(("adapter", Way(), *with_adapter(arch)))
    for name, way, policy, trained in cases:
        count, turns = Count(), rollout(policy, way)
        for budget in BUDGETS:
            for turn, logprobs in zip(
                turns, trained_logprobs(trained, turns, budget, way.sampling.temperature or 1.0), strict=True
            ):
                count.add(turn.logprobs, logprobs, f"budget {budget}")
        yield name, count


def padded_logprobs(model: PreTrainedModel, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
    """One pass over sequences padded on the left, and a log-softmax."""
    pairs = list(zip(prompts, tokens, strict=True))
    longest = max(len(p) + len(t) for p, t in pairs)
    rows = [[0] * (longest - len(p) - len(t)) + [*p, *t] for p, t in pairs]
    mask = torch.tensor([[int(i >= longest - len(p) - len(t)) for i in range(longest)] for p, t in pairs])
    given = {"input_ids": torch.tensor(rows), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    logits = model(**given, use_cache=False).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(2, given["input_ids"][:, 1:, None])[..., 0]
    return [row[-len(t) :].tolist() for row, t in zip(chosen, tokens, strict=True)]


def hugging_face(arch: str) -> Count:
    """`generate`, and a pass over the same tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model: Any = plain_model(arch, "eager" if arch == "gemma2" else "sdpa")
    count = Count()
    prompts = [list(p) for p in prompts_of(1)]
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[int(i >= longest - len(p)) for i in range(longest)] for p in prompts])
    options = {"max_new_tokens": RESPONSE, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}
    done = model.generate(rows, attention_mask=mask, output_logits=True, **options)
    tokens = done.sequences[:, longest:]
    sampled = torch.stack(done.logits, 1).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    for a, b in zip(sampled.tolist(), padded_logprobs(model, prompts, tokens.tolist()), strict=True):
        count.add(a, b)
    return count


def vllm(python: str, arch: str) -> Count:
    """vLLM, in its own environment, and a pass of Hugging Face's model over the same tokens."""
    torch.set_num_threads(1)
    model, count = plain_model(arch, "sdpa"), Count()
    prompts = [list(p) for p in prompts_of(1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deepcopy(model).save_pretrained(folder)
        (folder / "work.json").write_text(json.dumps({"prompts": prompts, "tokens": RESPONSE}))
        script = str(Path(__file__).parent / "peers/vllm_logprobs.py")
        done = subprocess.run([python, script, name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found = json.loads((folder / "found.json").read_text())
    for a, b in zip(found["logprobs"], padded_logprobs(model, prompts, found["tokens"]), strict=True):
        count.add(a, b)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MORE), help="some of the architectures")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM")
    args = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows: dict[str, Any] = {}
    whole = Count()
    with torch.no_grad():
        for arch in args.only.split(","):
            row = rows[arch] = {}
            for threads in map(int, args.threads.split(",")):
                for name, count in ours(arch, threads):
                    row[f"{name}, {threads} threads"] = count.row()
                    whole.tokens, whole.differ = whole.tokens + count.tokens, whole.differ + count.differ
                    whole.largest = max(whole.largest, count.largest)
                    print(f"{arch:10s} {name:10s} {threads} threads  {count.row()}", flush=True)
            row["hugging face"] = hugging_face(arch).row()
            print(f"{arch:10s} Hugging Face generate  {row['hugging face']}", flush=True)
            if args.vllm and arch == "qwen2":
                row["vllm"] = vllm(args.vllm, arch).row()
                print(f"{arch:10s} vLLM  {row['vllm']}", flush=True)
    print(json.dumps({**whole.row(), "threads": args.threads, "architectures": rows}))


if __name__ == "__main__":
    main()
