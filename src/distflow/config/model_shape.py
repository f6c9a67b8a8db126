"""The shapes of a model, and the parameters, FLOPs and bytes that follow from them. Imports no torch."""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from distflow.config.schema import WITH_VISION, ModelConfig, Section
from distflow.config.yaml import parse
from distflow.errors import ConfigError, cut, short_reason, suggest

Floats = NDArray[np.float64]
_FILE = Path(__file__).parent / "models.yaml"
_HUB_S = 10.0  # for an answer of the hub


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
    def table_params(self) -> int:
        """The parameters of the embedding and the output layer."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def layer_params(self) -> float:
        return (self.params - self.table_params) / self.layers

    def rank_params(self, tp: int) -> float:
        """The parameters of a rank of `tp`: each has the embedding and the output layer as a whole."""
        return self.layer_params * self.layers / tp + self.table_params

    @property
    def active_params(self) -> float:
        """Parameters that one token is multiplied with, without the embedding."""
        return self._count(self.active) - (0 if self.tied else self.vocab * self.hidden)

    @property
    def active_experts(self) -> float:
        """Parameters of experts that one token is multiplied with; 0 without a mixture."""
        return self.active * self.layers * self._mlp if self.experts > 1 else 0.0

    def read_experts(self, tokens: Floats) -> Floats:
        """Returns the parameters of experts that a forward pass on this many tokens reads: of those in use."""
        used = self.experts * (1 - (1 - self.active / self.experts) ** tokens)
        return used * self.layers * self._mlp * (self.experts > 1)

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, lengths: Floats) -> Floats:
        """Returns the FLOPs of causal attention in a forward pass on sequences of these lengths."""
        return 2.0 * self.layers * self.heads * self.head_dim * lengths**2


def load_model(name: str) -> ModelShape:
    """Returns the shapes of a model by its name in models.yaml; `Qwen/Qwen2.5-7B-Instruct` is found as well."""
    shapes, plain = _known(), _plain(name)
    if plain not in shapes:
        raise ConfigError(
            f"--model: the shapes of '{cut(name)}' are not known{suggest(plain, shapes)};"
            " or give the directory of a model, which has a config.json"
        )
    return ModelShape(name=name, **shapes[plain])


@cache
def _known() -> dict[str, dict[str, Any]]:
    shapes: dict[str, dict[str, Any]] = parse(_FILE.read_text())
    return shapes


def _plain(name: str) -> str:
    """Returns a model's name as models.yaml has it: without its owner, or what it was tuned for."""
    plain = name.rpartition("/")[2].lower()
    for suffix in ("-instruct", "-base", "-chat", "-it"):
        plain = plain.removesuffix(suffix)
    return plain.replace("-math-", "-")


def shape_of(given: ModelConfig | str, base: Path) -> ModelShape:
    """Returns the shapes of a config's model: from the config, from the model's directory, or known by name."""
    if isinstance(given, ModelConfig) and given.arch is not None:
        heads, (experts, active) = given.heads or max(1, given.hidden // 64), given.mixture
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
            experts=experts,
            active=active,
        )
    name = given if isinstance(given, str) else given.path
    assert name is not None
    file = base / Path(name) / "config.json"
    return shape_from(json.loads(file.read_text()), file.parent.name, str(file)) if file.exists() else load_model(name)


def reads_images(given: ModelConfig | None, base: Path, matters: Callable[[], bool]) -> bool:
    """Returns whether the model of a config has a vision tower.

    The hub is asked only if it `matters`, and for a model that is neither here nor known as a text model; no answer is
    an error, as images must not be left out silently.
    """
    if given is None or given.arch is not None:
        return given is not None and given.arch in WITH_VISION
    name = given.path
    assert name is not None
    file = base / Path(name).expanduser() / "config.json"
    if file.exists():
        return _has_vision(file.read_text(), str(file))
    if not matters() or _plain(name) in _known():
        return False
    if file.parent.exists():
        raise ConfigError(f"model: whether it reads images cannot be known: there is no {file}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return False  # a directory that is not there yet: this can be planned, and no run starts without it
    return _has_vision(_of_hub(name), f"the config.json of '{name}'")


def _has_vision(text: str, where: str) -> bool:
    try:
        return "vision_config" in json.loads(text)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"model: {where} cannot be read: {cut(str(e))}") from None


@cache
def _of_hub(name: str) -> str:
    """Returns the config.json of a model of the hub. Few attempts are made: a run fetches the whole model later."""
    from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    kept = try_to_load_from_cache(name, "config.json")
    if isinstance(kept, str):
        return Path(kept).read_text()
    for wait in (1.0, None):
        try:
            url, headers = hf_hub_url(name, "config.json"), build_hf_headers()
            answer = get_session().get(url, headers=headers, timeout=_HUB_S, follow_redirects=True)
            hf_raise_for_status(answer)
            return str(answer.text)
        except Exception as e:  # the hub's client has many errors: not found, no access, no network, offline
            if wait is None:
                raise ConfigError(
                    f"model: whether '{name}' reads images cannot be known: the hub does not give us its config.json:"
                    f" {short_reason(e)}; check the name, your access (HF_TOKEN) and the network, or give a directory"
                ) from None
            time.sleep(wait)
    raise AssertionError


def shape_from(config: dict[str, Any], name: str, where: str) -> ModelShape:
    """Returns the shapes that the config of a Hugging Face model has; `where` it comes from."""
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 1
        return ModelShape(
            name=name,
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
        raise ConfigError(f"--model: {where} has no key {e}; give a model by name instead") from None
