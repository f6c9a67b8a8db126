"""What a GPU would be asked to do, counted here without one: on tensors that have shapes and no memory.

    python bench/rehearsal.py [--only sampler_kernels]

  handover_messages messages that a rank sends and receives in a weight sync, and the groups that they are in, from
                    train dp N to generate dp N/tp × tp, on hosts of 8
  sampler_kernels   kernels to sample a token for each of so many sequences; vocabulary of 152,064
  decode_kernels    kernels of the built-in engine to compute the logits of the next token of each of 256 sequences,
                    of up to 1,024 tokens; an operation is counted as one, and flash attention may add copies of its own
  peak_gb           10^9 bytes that a GPU of 80 GiB needs at most in training, and in a rollout with its KV cache;
                    GRPO, micro-batches of 16,384 tokens. Before: what training needed in float32
                    without gradient checkpointing, which were the defaults. With the tp that
                    is chosen for generation
  device_waits_per_step
                    how often the host waits for the device in log-probs and an update, with one micro-batch, with
                    several, and with twice the layers; counted on the device of tests/accelerator

Beside each number is what version 0.2.0 has, by the same count. The last line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from accelerator.rehearse import rehearse
from accelerator.scenarios import Case
from accelerator.test_device_waits import Sized, all_waits
from distflow.config.loading import make_config
from distflow.config.model_shape import load_model
from distflow.device.offer import Offer
from distflow.rehearsal.check import config_from, walk
from distflow.rehearsal.launches import DecodingStep, Launches
from distflow.rollout.engine import SamplingParams
from distflow.rollout.sampling import sample
from distflow.run.program import Program
from weights.message_count import SPECS
from weights.message_count import count as count_messages

META = torch.device("meta")
_WAITS = (25, 75, 25)  # of version 0.2.0


def sampler_kernels() -> dict[str, dict[str, int]]:
    def count(sequences: int) -> int:
        logits = torch.empty(sequences, 152064, device=META, dtype=torch.bfloat16)
        numbers = np.arange(sequences)
        for _ in range(2):  # the bits of the vocabulary are made once
            with Launches() as launches:
                sample(logits, SamplingParams(max_tokens=10), 0, numbers, numbers)
        return launches.total

    before = {32: 150, 256: 1038, 1024: 4110}
    return {f"{n} sequences": {"was": was, "is": count(n)} for n, was in before.items()}


def decode_kernels() -> dict[str, dict[str, int]]:
    def count(size: str) -> int:
        return DecodingStep(load_model(f"qwen2.5-{size}"), 256, 1024).launches().total

    before = {"0.5B": 4940, "7B": 5744, "72B": 16196}
    return {f"{size}, 256 sequences": {"was": was, "is": count(size.lower())} for size, was in before.items()}


def handover_messages() -> dict[str, dict[str, Any]]:
    def count(model: str, workers: int, tp: int) -> dict[str, int]:
        found = count_messages(SPECS[model], workers, tp)
        return {key: found[key] for key in ("messages", "groups")}

    before = {
        ("7B", 8, 1): (27_566, 1_969),
        ("7B", 8, 2): (22_162, 2_223),
        ("7B", 128, 1): (75_174, 17_085),
    }
    rows: dict[str, dict[str, Any]] = {}
    for (model, n, tp), (messages, groups) in before.items():
        rows[f"{model} on {n}, tp {tp}"] = {
            "was": {"messages": messages, "groups": groups},
            "is": count(model, n, tp),
        }
    return rows


def peak_gb() -> dict[str, dict[str, Any]]:
    before = ("train.dtype=float32", "train.gradient_checkpointing=false", "train.offload=none")
    found: dict[str, dict[str, Any]] = {}
    for model, workers in (("0.5b", 1), ("7b", 8), ("32b", 8), ("72b", 32), ("72b", 64)):
        was, now = (_peaks(f"qwen2.5-{model}", workers, overrides) for overrides in (before, ()))
        found[f"{model.upper()} on {workers}"] = {"was": {"training": was["training"]}, "is": now}
    return found


def _peaks(model: str, workers: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    data = {"files": "data.jsonl", "fields": ["prompt"], "batch": 128}
    raw = {"flow": "grpo", "data": data, "model": model, "reward": "reward.py:score"}
    with TemporaryDirectory() as folder:
        config_from(load_model(model)).save_pretrained(Path(folder, model))
        Path(folder, "reward.py").write_text("def score(solution_str):\n    return 0.0\n")
        program = Program(make_config(raw, overrides, Path(folder), "the config", "bench"))
        walked = walk(program, workers, Offer("cuda", "80 GiB", 80 << 30, True), torch.device("cuda"))
        peaks = {name: round(size / 1e9, 1) for name, size in walked.peaks().items()}
    tp = [c.value for c in walked.choices if c.key.endswith(".tp")]
    return peaks | {"tp": tp[0] if tp else 1}


def device_waits_per_step() -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {"one": {}, "several": {"micro_tokens": 12}, "deeper": {"layers": 4}}
    cases = [Sized(**{**vars(Case()), **size}) for size in sizes.values()]
    (counted,) = rehearse(1, all_waits, cases)
    names = ("one micro-batch", "several micro-batches", "twice the layers")
    return {name: {"was": was, "is": is_} for name, was, (is_, _) in zip(names, _WAITS, counted, strict=True)}


KEYS: dict[str, Callable[[], Any]] = {
    "handover_messages": handover_messages,
    "sampler_kernels": sampler_kernels,
    "decode_kernels": decode_kernels,
    "peak_gb": peak_gb,
    "device_waits_per_step": device_waits_per_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KEYS), help="keys, with commas between them")
    args = parser.parse_args()
    result = {key: KEYS[key]() for key in args.only.split(",")}
    for key, rows in result.items():
        for name, row in rows.items():
            print(f"{key}, {name}: {row}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
