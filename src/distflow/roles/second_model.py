"""Opens another model than the config's, for a role that has one of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distflow.config.schema import ModelConfig
from distflow.errors import ConfigError
from distflow.model.source import Source, open_model
from distflow.roles.context import RoleContext


def source_of(role: RoleContext, model: ModelConfig | Mapping[str, Any] | None) -> Source:
    """Opens the model of a role: the one that is given as a section of a config, or the config's."""
    if model is None:
        return role.model
    given = model if isinstance(model, ModelConfig) else ModelConfig(**model)
    return open_second_model(role.name, given, role.base, role.seed, role.source)


def open_second_model(role: str, given: ModelConfig, base: Path, seed: int, main: Source | None) -> Source:
    """Opens another model than the config's; it reads the same tokens."""
    if given.path is None:
        raise ConfigError(f"role '{role}': its model is given by `path`; only the main model may have random weights")
    source = open_model(given, lambda: iter(()), base, seed)
    if main is not None and not main.tokenizer.get_vocab().items() <= source.tokenizer.get_vocab().items():
        raise ConfigError(
            f"role '{role}': '{source.name}' has another vocabulary than '{main.name}', and reads its tokens;"
            " give a model of the same family, or write a node that encodes the text anew"
        )
    return source
