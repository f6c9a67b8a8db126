"""Writes a model without every third of its layers, but with the first and the last: a student of the whole one.

python examples/distillation/smaller.py runs/smollm2/model runs/smollm2/student
"""

import sys
from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


def write(teacher: Path, student: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layer for i, layer in enumerate(layers) if i % 3 != 1)
    model.config.num_hidden_layers = len(model.model.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(model.model.layers)]
    model.save_pretrained(student)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(student)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
