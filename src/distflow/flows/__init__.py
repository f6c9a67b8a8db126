"""Built-in algorithms, one short file each; a config names them by these names."""

BUILT_IN = {
    "evaluate": "distflow.flows.evaluate:evaluate",
    "grpo": "distflow.flows.grpo:grpo",
    "sft": "distflow.flows.sft:sft",
}
