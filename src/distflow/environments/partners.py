"""Environments as the worker sees them once their code is loaded: how to render, and the limits of conversations."""

import logging
from collections.abc import Mapping, Sequence

from distflow.config.schema import EnvironmentConfig
from distflow.engine.model.text import Text
from distflow.environments.conversations import Partner
from distflow.environments.rendering import Renderer
from distflow.environments.session import Limits
from distflow.environments.spec import Description

logger = logging.getLogger(__name__)


def make_partners(
    environments: Mapping[str, EnvironmentConfig], descriptions: Sequence[Description], text: Text, max_tokens: int
) -> list[Partner]:
    """Checks the chat template against each environment; raises if it cannot continue conversations with it."""
    partners = []
    for (name, e), description in zip(environments.items(), descriptions, strict=True):
        renderer = Renderer(text, e.tool_parser)
        for tools in description.tools.values():
            for warning in renderer.check(tools):
                logger.warning("environment '%s': %s", name, warning)
        weights = {f.name or f.call: f.weight for f in e.rewards}
        limits = Limits(e.max_turns, max_tokens, e.turn_tokens)
        partners.append(Partner(name, renderer, limits, e.concurrent, weights, description.needs_endpoint))
    return partners
