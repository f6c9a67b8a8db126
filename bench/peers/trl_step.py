# mypy: ignore-errors
"""TRL's GRPOTrainer on the steps of bench/step.py, which starts it under torchrun; not run by itself.

OMP_NUM_THREADS=1 .peers/trl/bin/torchrun --nproc-per-node 2 bench/peers/trl_step.py --assets DIR --out FILE
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import torch
import torch.distributed as dist
from datasets import load_dataset
from grpo_steps import LR, arguments, report, score, settled
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.extras import profiling

WORKERS = int(os.environ["WORLD_SIZE"])
spans: dict[str, list[float]] = defaultdict(list)


class Timed(GRPOTrainer):
    """Counts the tokens of the responses, and the time of the part of a step before its update."""

    tokens: list[int]

    def _generate_and_score_completions(self, *args, **kwargs):
        began = time.perf_counter()
        out = super()._generate_and_score_completions(*args, **kwargs)
        spans["rollout"].append(time.perf_counter() - began)
        self.tokens.append(int(out["completion_mask"].sum()))
        return out


class Steps(TrainerCallback):
    """Takes the time of whole steps: one begins before its responses are generated."""

    def __init__(self):
        self.s, self.cpu_s = [], []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, *args, **kwargs):
        self.s.append(time.perf_counter() - self.began[0])
        self.cpu_s.append(time.process_time() - self.began[1])


def reward(completions, answer, **_):
    return [score(c, a) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    args = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    profiling.ProfilingContext._log_metrics = lambda self, duration: spans[self.name].append(duration)
    steps = Steps()
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(args.assets, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.assets),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.gettempdir(),
            use_cpu=True,
            bf16=False,
            max_steps=args.steps,
            per_device_train_batch_size=args.prompts * args.samples // WORKERS,
            num_generations=args.samples,
            max_completion_length=args.response,
            learning_rate=LR,
            beta=args.kl,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            temperature=1.0,
            generation_kwargs=None if args.ragged else {"min_new_tokens": args.response},
        ),
        train_dataset=load_dataset("json", data_files=str(args.assets / "prompts.jsonl"), split="train"),
        callbacks=[steps],
    )
    trainer.tokens = []
    trainer.train()
    cpu: list = [None] * WORKERS
    dist.all_gather_object(cpu, steps.cpu_s)
    if dist.get_rank() == 0:
        phases = {name: round(sum(settled(s)) / len(settled(steps.s)), 4) for name, s in spans.items()}
        tokens = WORKERS * statistics.mean(settled(trainer.tokens))  # rank 0 stands for all
        packages = ("trl", "transformers", "torch")
        cpu_s = [sum(of_ranks) for of_ranks in zip(*cpu, strict=True)]
        report(args, steps.s, cpu_s, packages, phases_s=phases, tokens_per_step=round(tokens))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
