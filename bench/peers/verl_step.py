# mypy: ignore-errors
"""verl 0.5.0's trainer on the steps of bench/step.py, which starts it; not run by itself.

    OMP_NUM_THREADS=1 .peers/verl05/bin/python bench/peers/verl_step.py --assets DIR --out FILE

Its single controller, FSDP workers over gloo, rollouts by Hugging Face's `generate`.
"""

import os
from itertools import pairwise

import psutil
import ray
import verl.trainer.ppo.ray_trainer as ray_trainer
from grpo_steps import arguments, medians, ray_settings, report, verl_like
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import collate_fn
from verl_worker import CpuWorker

MORE = {
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": "fp32",
}


def cpu_seconds() -> float:
    """Returns those of the driver and everything it has started."""
    me, spent = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system
    return spent


def main() -> None:
    args = arguments()
    os.environ["PEER_RESPONSE"] = str(args.response)
    wanted = verl_like(args, args.workers) | MORE
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{key}={value}" for key, value in wanted.items()])
    OmegaConf.resolve(config)
    ray.init(**ray_settings(args.workers))
    steps, cpu = [], [cpu_seconds()]
    log = ray_trainer.compute_timing_metrics

    def look(batch, timing_raw):
        steps.append(dict(timing_raw))
        cpu.append(cpu_seconds())
        return log(batch=batch, timing_raw=timing_raw)

    ray_trainer.compute_timing_metrics = look
    roles = [ray_trainer.Role.ActorRollout, *([ray_trainer.Role.RefPolicy] if args.kl else [])]
    tokenizer = hf_tokenizer(str(args.assets))
    data = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    pools = ray_trainer.ResourcePoolManager({"pool": [args.workers]}, dict.fromkeys(roles, "pool"))
    trainer = ray_trainer.RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={role: ray.remote(CpuWorker) for role in roles},
        resource_pool_manager=pools,
        ray_worker_group_cls=RayWorkerGroup,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        val_reward_fn=None,
        train_dataset=data,
        val_dataset=data,
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, data),
    )
    trainer.init_workers()
    trainer.fit()
    spent = [after - before for before, after in pairwise(cpu)]
    phases = medians(steps)
    report(args, [s["step"] for s in steps], spent, ("verl", "ray", "transformers", "torch"), phases_s=phases)
    ray.shutdown()


if __name__ == "__main__":
    main()
