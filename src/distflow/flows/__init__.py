"""The built-in algorithms, one short file each, under the names that `flow:` in a config takes."""

BUILT_IN = {
    "cispo": "distflow.flows.cispo:cispo",
    "cpgd": "distflow.flows.cpgd:cpgd",
    "dapo": "distflow.flows.dapo:dapo",
    "dpo": "distflow.flows.dpo:dpo",
    "dr_grpo": "distflow.flows.dr_grpo:dr_grpo",
    "evaluate": "distflow.flows.evaluate:evaluate",
    "gpg": "distflow.flows.gpg:gpg",
    "grpo": "distflow.flows.grpo:grpo",
    "gspo": "distflow.flows.gspo:gspo",
    "opo": "distflow.flows.opo:opo",
    "ppo": "distflow.flows.ppo:ppo",
    "reinforce_pp": "distflow.flows.reinforce_pp:reinforce_pp",
    "reinforce_pp_baseline": "distflow.flows.reinforce_pp_baseline:reinforce_pp_baseline",
    "remax": "distflow.flows.remax:remax",
    "reward_model": "distflow.flows.reward_model:reward_model",
    "rloo": "distflow.flows.rloo:rloo",
    "sft": "distflow.flows.sft:sft",
}
