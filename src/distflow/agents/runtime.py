"""Environments as the worker sees them once their code is loaded: how to render, and the limits of conversations."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distflow.agents.rendering import Renderer
from distflow.agents.session import ConversationLimits
from distflow.agents.spec import Description
from distflow.config.schema import EnvironmentConfig
from distflow.model.text import Text
from distflow.util.alike import warn_alike

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvironmentRuntime:
    """An environment, and the limits of conversations with it."""

    name: str
    renderer: Renderer
    limits: ConversationLimits
    concurrent: int
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # of functions that score at the end
    needs_endpoint: bool = False
    warm: int = 0  # conversations whose environments are started ahead
    turns_ahead: int = 1  # of a conversation in a step before its own


def make_runtimes(
    environments: Mapping[str, EnvironmentConfig], descriptions: Sequence[Description], text: Text, max_tokens: int
) -> list[EnvironmentRuntime]:
    """Checks the chat template against each environment; raises if it cannot continue conversations with it."""
    runtimes = []
    for (name, e), description in zip(environments.items(), descriptions, strict=True):
        renderer = Renderer(text, e.tool_parser)
        for tools in description.tools.values():
            for warning in renderer.check(tools):
                warn_alike(logger, "environment '%s': %s", name, warning)
        weights = {f.name or f.call: f.weight for f in e.rewards}
        limits = ConversationLimits(e.max_turns, max_tokens, e.turn_tokens, e.sample_tokens, e.sample_seconds)
        rest = weights, description.needs_endpoint, e.warm, e.turns_ahead
        runtimes.append(EnvironmentRuntime(name, renderer, limits, e.concurrent, *rest))
    return runtimes
