# mypy: ignore-errors
"""siiRL 0.2.0 on the steps of bench/step.py, which starts it; not run by itself.

    OMP_NUM_THREADS=1 .peers/siirl/bin/python bench/peers/siirl_step.py --assets DIR --out FILE

FSDP over gloo, rollouts by Hugging Face's `generate`. All stages have one layout, in which its data coordinator passes
samples on without moving them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import siirl_worker
from grpo_steps import arguments, medians, ray_settings, report, verl_like


def main() -> None:
    args = arguments()
    train = "actor_rollout_ref"
    config = verl_like(args, args.workers) | {
        "data.num_loader_workers": 0,
        "data.shuffle": False,
        f"{train}.actor.fsdp_config.wrap_policy.disable": True,  # as verl does for this rollout
        f"{train}.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{train}.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{train}.rollout.mode": "sync",
        f"{train}.rollout.response_length": args.response,
        "dag.enable_perf": True,
    }
    config[f"{train}.rollout.prompt_length"] = config["data.max_prompt_length"]
    if not args.kl:
        config["dag.custom_pipeline_fn"] = "siirl_worker:grpo_without_reference"
    with tempfile.TemporaryDirectory() as folder:
        times = str(Path(folder) / "times")
        os.environ["PEER_TIMES"] = times
        sys.argv = [sys.argv[0], *(f"{key}={value}" for key, value in config.items())]
        siirl_worker.prepare()
        import ray
        import siirl.main_dag

        settings = ray_settings(args.workers, PEER_TIMES=times)
        settings["runtime_env"]["worker_process_setup_hook"] = siirl_worker.prepare
        ray.init(**settings)
        siirl.main_dag.main()
        files = [Path(f"{times}.{rank}") for rank in range(args.workers)]
        ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        ray.shutdown()
    steps = [row["s"] for row in ranks[0]]
    spent = [sum(row["cpu_s"] for row in rows) for rows in zip(*ranks, strict=True)]
    phases = medians([row["phases_s"] for row in ranks[0]])
    report(args, steps, spent, ("siirl", "ray", "transformers", "torch"), phases_s=phases)


if __name__ == "__main__":
    main()
