# mypy: ignore-errors
"""The work of bench/step.py, for the scripts beside this one that run it in another framework; not run by itself."""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

WARM_UP, LR = 2, 1e-5
HERE = Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    """Returns what bench/step.py asks of every peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--assets", type=Path, required=True, help="model, tokenizer and prompts")
    parser.add_argument("--out", type=Path, required=True, help="for the result")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, over all processes")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of each; with --ragged at most")
    parser.add_argument("--ragged", action="store_true", help="a response ends where the model ends it")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL term; 0: no reference model")
    parser.add_argument("--workers", type=int, default=2, help="processes; under torchrun it knows them already")
    return parser.parse_args()


def score(completion: str, answer: str) -> float:
    """Scores as bench/step.py does for our own run."""
    return 1.0 if completion.strip().startswith(answer) else -0.01 * abs(4 - len(completion.split()))


def settled(values: list) -> list:
    """Leaves out the steps to warm up."""
    return values[WARM_UP:] if len(values) > WARM_UP + 2 else values


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each key over the steps that are not warm-up."""
    rows = settled(rows)
    return {key: round(statistics.median(row[key] for row in rows if key in row), 4) for key in rows[-1]}


def report(args: argparse.Namespace, steps_s: list[float], cpu_s: list[float], packages: Iterable[str], **more) -> None:
    """Writes the result: seconds of every step, CPU seconds of a step over all processes, versions."""
    row = {
        "steps_s": [round(s, 4) for s in steps_s],
        "step_cpu_s_median": round(statistics.median(settled(cpu_s)), 4),
        "tokens_per_step": args.prompts * args.samples * args.response,
        "versions": {package: version(package) for package in packages},
    }
    args.out.write_text(json.dumps(row | more))


def verl_like(args: argparse.Namespace, workers: int) -> dict[str, object]:
    """Returns the config that verl and siiRL share: FSDP, rollouts by Hugging Face, all samples in one micro-batch."""
    data, train = str(args.assets / "prompts.parquet"), "actor_rollout_ref"
    micro = args.prompts * args.samples // workers
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": _longest_prompt(args.assets),
        "data.max_response_length": args.response,
        "data.filter_overlong_prompts": False,
        f"{train}.model.path": str(args.assets),
        f"{train}.model.use_remove_padding": False,
        f"{train}.model.enable_gradient_checkpointing": False,
        f"{train}.actor.strategy": "fsdp",
        f"{train}.actor.optim.lr": LR,
        f"{train}.actor.use_torch_compile": False,
        f"{train}.actor.ppo_mini_batch_size": args.prompts,
        f"{train}.actor.ppo_micro_batch_size_per_gpu": micro,
        f"{train}.actor.use_kl_loss": bool(args.kl),
        f"{train}.actor.kl_loss_coef": args.kl or 0.001,
        f"{train}.rollout.name": "hf",
        f"{train}.rollout.n": args.samples,
        f"{train}.rollout.tensor_model_parallel_size": 1,
        f"{train}.rollout.log_prob_micro_batch_size_per_gpu": micro,
        f"{train}.ref.log_prob_micro_batch_size_per_gpu": micro,
        "custom_reward_function.path": str(HERE / "verl_reward.py"),
        "custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": workers,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": args.steps,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": tempfile.gettempdir(),
        "trainer.device": "cuda",
    }


def ray_settings(workers: int, **more: str) -> dict[str, object]:
    """Returns what Ray is started with. The GPUs are names: the workers are placed on them and never touch one."""
    passed = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA", "PEER_NO_SYNC", "PEER_RESPONSE")
    env = {name: os.environ[name] for name in passed if name in os.environ}
    env |= {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", **more}
    return {
        "num_cpus": 16,
        "num_gpus": workers,
        "include_dashboard": False,
        "object_store_memory": 1 << 30,
        "_memory": 6 << 30,
        "runtime_env": {"env_vars": env},
        "logging_level": "ERROR",
    }


def _longest_prompt(assets: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets)
    prompts = (json.loads(line)["prompt"] for line in (assets / "prompts.jsonl").read_text().splitlines())
    return max(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
