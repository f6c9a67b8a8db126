# mypy: ignore-errors
"""TRL's tool loop on the conversations of bench/agents.py, which starts it; not run by itself.

    .peers/trl/bin/python bench/peers/trl_tools.py MODEL CONVERSATIONS TURNS MAX_TOKENS

The time is that of `GRPOTrainer._generate`: prompts to completions, with all tool calls in between. Nothing is trained.
"""

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from serve import keep_stdout_for_answers, serve

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}


def main() -> None:
    keep_stdout_for_answers()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from peers.slow_environment import Slow

    model, conversations, turns, max_tokens = sys.argv[1], *map(int, sys.argv[2:5])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # how it reads tool calls
    spent, tokens = [], []

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            began = time.perf_counter()
            result = super()._generate(prompts)
            spent.append(time.perf_counter() - began)
            mask = result[2] if isinstance(result, tuple) else None
            tokens.append(sum(map(sum, mask)) if mask else 0)
            return result

    config = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=conversations,
        num_generations=2,
        max_completion_length=max_tokens,
        max_tool_calling_iterations=turns - 1,
        beta=0.0,
        gradient_checkpointing=False,
        report_to=[],
        temperature=1.0,
        top_k=0,
    )
    rows = [{"prompt": [{"role": "user", "content": "look"}], "seed": i} for i in range(conversations)]
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list(rows),
        environment_factory=Slow,
    )
    trainer.model.train()
    rounds = 0

    def work() -> dict[str, float]:
        nonlocal rounds
        inputs = [{**row, "seed": rounds * conversations + row["seed"]} for row in rows]
        rounds += 1
        trainer._generate_and_score_completions(inputs)
        calls = sum(e.calls for e in trainer.environments)
        return {"loop_s": spent[-1], "calls": calls, "turns": calls + conversations, "tokens": tokens[-1]}

    trainer.max_tool_calling_iterations = 1
    work()
    trainer.max_tool_calling_iterations, rounds = turns - 1, 0
    about = f"trl {version('trl')}, transformers {version('transformers')}, torch {torch.__version__}"
    serve(work, {"version": about})


if __name__ == "__main__":
    main()
