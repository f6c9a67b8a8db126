"""The shapes of a model, and the parameters, FLOPs and bytes that follow from them. Imports no torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from distflow.config.schema import ModelConfig, Section
from distflow.config.yaml import parse
from distflow.errors import ConfigError, cut, suggest

Floats = NDArray[np.float64]
_FILE = Path(__file__).parent / "models.yaml"


class ModelShape(Section):
    """A decoder with gated MLPs: `experts` of them per layer; each token uses `active`."""

    name: str = "model"
    hidden: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    ffn: int = Field(gt=0)
    vocab: int = Field(gt=0)
    tied: bool = False
    experts: int = Field(1, gt=0)
    active: int = Field(1, gt=0)

    @property
    def _attention(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden * self.ffn

    def _count(self, mlps: float) -> float:
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = self._attention + router + mlps * self._mlp + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def params(self) -> float:
        return self._count(self.experts)

    @property
    def active_params(self) -> float:
        """Parameters that one token is multiplied with, without the embedding."""
        return self._count(self.active) - (0 if self.tied else self.vocab * self.hidden)

    def read_params(self, tokens: Floats) -> Floats:
        """Returns the parameters that a forward pass on this many tokens reads, with only the experts in use."""
        used = self.experts * (1 - (1 - self.active / self.experts) ** tokens)
        rest = self._count(0) - (0 if self.tied else self.vocab * self.hidden)
        return rest + np.where(self.experts > 1, used, 1.0) * self.layers * self._mlp

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, lengths: Floats) -> Floats:
        """Returns the FLOPs of a forward pass on sequences of these lengths, with causal attention."""
        return 2 * self.active_params * lengths + 2 * self.layers * self.heads * self.head_dim * lengths**2


def load_model(name: str) -> ModelShape:
    """Returns the shapes of a model by its name in models.yaml; `Qwen/Qwen2.5-7B-Instruct` is found as well."""
    shapes: dict[str, dict[str, Any]] = parse(_FILE.read_text())
    plain = name.rpartition("/")[2].lower()
    for suffix in ("-instruct", "-base", "-chat", "-it"):
        plain = plain.removesuffix(suffix)
    plain = plain.replace("-math-", "-")
    if plain not in shapes:
        raise ConfigError(
            f"--model: the shapes of '{cut(name)}' are not known{suggest(plain, shapes)};"
            " or give the directory of a model, which has a config.json"
        )
    return ModelShape(name=name, **shapes[plain])


def shape_of(given: ModelConfig | str, base: Path) -> ModelShape:
    """Returns the shapes of a config's model: from the config, from the model's directory, or known by name."""
    if isinstance(given, ModelConfig) and given.arch is not None:
        heads = given.heads or max(1, given.hidden // 64)
        return ModelShape(
            name=f"a small {given.arch}",
            hidden=given.hidden,
            layers=given.layers,
            heads=heads,
            kv_heads=given.kv_heads or heads,
            head_dim=given.hidden // heads,
            ffn=given.ffn or 4 * given.hidden,
            vocab=given.vocab,
            tied=True,
        )
    name = given if isinstance(given, str) else given.path
    assert name is not None
    file = base / Path(name) / "config.json"
    return _from_hf(json.loads(file.read_text()), file) if file.exists() else load_model(name)


def _from_hf(config: dict[str, Any], file: Path) -> ModelShape:
    """Reads the config of a Hugging Face model."""
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 1
        return ModelShape(
            name=file.parent.name,
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            active=config.get("num_experts_per_tok") or 1,
        )
    except KeyError as e:
        raise ConfigError(f"--model: {file} has no key {e}; give a model by name instead") from None
