"""Trains from Python, as in a notebook: a reward defined here, metrics as they come, and a model to generate with.

`# %%` starts a cell; editors and Jupyter (jupytext) run them one by one. Workers import the reward from this file, so
what is to run only once is under `if __name__ == "__main__":`.
"""

# %% The reward: a response should consist of digits
import json
from pathlib import Path

import distflow

HERE = Path(__file__).parent


def digits(prompts, completions, log_metric, **columns):
    """TRL's signature: all completions of a call, one score for each."""
    log_metric("length", sum(map(len, completions)) / len(completions))
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def main(folder: Path = HERE / "runs") -> None:
    # %% The data: prompts, as a Trainer would take them
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"a number after {i}: "}) + "\n" for i in range(64)))

    # %% The run: a config as a dict, with functions as objects
    config = {
        "flow": "grpo",
        "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": data, "batch": 8},
        "rollout": {"n": 8, "max_tokens": 8},
        "train": {"lr": 3e-2},
        "steps": 12,
        "workers": 2,
        "run_dir": folder / "digits",
    }
    for line in distflow.check(config, reward=digits):
        print(line)
    result = distflow.run(
        config, reward=digits, on_step=lambda step, m: print(f"after step {step}: {m['reward/mean']:.2f}")
    )

    # %% What was learned
    first, last = result.metrics[0], result.last
    print(f"reward {first['reward/mean']:.2f} -> {last['reward/mean']:.2f}, in {len(result.metrics)} steps")
    print(f"last checkpoint: {result.checkpoint}")

    # %% The model, to generate with
    from transformers import pipeline

    out = distflow.export(result, folder / "model")
    generate = pipeline("text-generation", model=str(out))
    print(generate("a number after 7: ", max_new_tokens=8, do_sample=False)[0]["generated_text"])


if __name__ == "__main__":
    main()
