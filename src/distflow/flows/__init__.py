"""Built-in algorithms, one short file each; a config names them by these names."""

BUILT_IN = {
    "cispo": "distflow.flows.cispo:cispo",
    "cpgd": "distflow.flows.cpgd:cpgd",
    "dr_grpo": "distflow.flows.dr_grpo:dr_grpo",
    "evaluate": "distflow.flows.evaluate:evaluate",
    "gpg": "distflow.flows.gpg:gpg",
    "grpo": "distflow.flows.grpo:grpo",
    "gspo": "distflow.flows.gspo:gspo",
    "opo": "distflow.flows.opo:opo",
    "reinforce_baseline": "distflow.flows.reinforce_baseline:reinforce_baseline",
    "rloo": "distflow.flows.rloo:rloo",
    "sft": "distflow.flows.sft:sft",
}
