"""Environments as the worker sees them once their code is loaded: how to render, and the limits of conversations."""

import logging
from collections.abc import Mapping, Sequence

from distflow.agents.conversations import Partner
from distflow.agents.rendering import Renderer
from distflow.agents.session import Limits
from distflow.agents.spec import Description
from distflow.config.schema import EnvironmentConfig
from distflow.model.text import Text

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
