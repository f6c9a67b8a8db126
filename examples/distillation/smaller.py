"""Writes a model without every third of its layers, the student, and answers of the whole model, from which it learns.

python examples/distillation/smaller.py runs/smollm2
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_student(model: Any, tokenizer: Any, folder: Path) -> None:
    """Leaves out layers 1, 4, 7, … of the model."""
    kept = [layer for i, layer in enumerate(model.model.layers) if i % 3 != 1]
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def write_answers(model: Any, tokenizer: Any, folder: Path, count: int, batch: int = 64) -> None:
    """Samples an answer to each of the first prompts."""
    torch.manual_seed(0)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:count]]
    with (folder / "answers.jsonl").open("w") as file:
        for i in range(0, len(rows), batch):
            prompts = [row["prompt"] for row in rows[i : i + batch]]
            given = tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            )
            out = model.generate(**given, max_new_tokens=24, do_sample=True)[:, given["input_ids"].shape[1] :]
            for prompt, answer in zip(prompts, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True):
                file.write(json.dumps({"prompt": prompt, "response": answer}) + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    write_answers(model, tokenizer, folder, count=320)
    write_student(model, tokenizer, folder / "student")
