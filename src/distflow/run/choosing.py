"""Chooses for the device of a run what its config leaves open."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from distflow.config import Config
from distflow.config.model_shape import ModelShape, shape_from, shape_of
from distflow.config.schema import ModelConfig
from distflow.device.choices import Choice, Chosen, choose, choose_tp
from distflow.device.offer import Offer
from distflow.errors import ConfigError
from distflow.plan import Plan
from distflow.run.program import MODEL_ROLES, Program


def choose_for(program: Program, plan: Plan, source: Any, device: torch.device, offer: Offer | None) -> Chosen:
    """Returns the config of a run with what is chosen for its device. `source`: the model, if it has one."""
    models = dict(_models(program, plan, source)) if offer and source else {}

    def vllm() -> str:
        from distflow.rollout.engine import load_engine

        try:
            load_engine("vllm").check(source, program.config.rollout, device, program.config.train.lora)
        except ConfigError as e:
            return e.problem
        return ""

    return choose(program.config, offer, plan, models, vllm)


def placed(program: Program, workers: int, offer: Offer | None) -> tuple[Program, tuple[Choice, ...]]:
    """Returns the program with what is chosen of its placement for devices that offer this, before there is a plan."""
    try:
        shape = shape_of(program.config.model, program.config.base) if offer and program.config.model else None
    except (ConfigError, OSError, ValueError):  # of another kind, or not here
        shape = None
    if shape is None:
        return program, ()
    models = dict.fromkeys(MODEL_ROLES, shape)

    def plan_of(config: Config) -> Plan:
        return Program(config, program.checkpoint).plan(workers)

    config, choices = choose_tp(program.config, offer, plan_of, models)
    return (Program(config, program.checkpoint) if choices else program), choices


def _models(program: Program, plan: Plan, source: Any) -> Iterator[tuple[str, ModelShape]]:
    """Yields role → the shapes of its model."""
    from distflow.model.source import find_folder

    config = program.config
    main = shape_from(source.config.to_dict(), source.name, "the config of the model")
    own: dict[str, ModelConfig | None] = {"critic": config.critic.model}
    own |= {"reward": config.reward.model if config.reward else None}
    own |= {name: role.model for name, role in config.roles.items()}
    for role in sorted({n.role for n in plan.flow.nodes if n.method and n.type != "compute"}):
        given = own.get(role)
        if given and given.path:
            file = find_folder(given.path, config.base) / "config.json"
            yield role, shape_from(json.loads(file.read_text()), given.path, str(file))
        elif role in MODEL_ROLES:
            yield role, main
