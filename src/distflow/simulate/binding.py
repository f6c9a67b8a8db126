"""Costs of the nodes of a config: its models, lengths and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distflow.config.model_shape import ModelShape, shape_of
from distflow.config.schema import ModelConfig
from distflow.errors import ConfigError, cut
from distflow.plan.field_bytes import KNOWN_FIELDS, PROMPT_TOKENS, FieldBytes
from distflow.run.program import Program
from distflow.simulate.costs import Costs

SPREAD = 0.7  # default


@dataclass(frozen=True)
class Assumptions:
    """Lengths that a config does not determine; None: half of its limit."""

    model: str | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    spread: float = SPREAD
    node_seconds: Mapping[str, float] = field(default_factory=dict)


def parse_node_seconds(texts: Sequence[str]) -> dict[str, float]:
    """Parses options such as `update=81`."""
    given: dict[str, float] = {}
    for text in texts:
        node, equals, value = text.partition("=")
        try:
            given[node] = float(value)
        except ValueError:
            equals = ""
        if not node or not equals:
            raise ConfigError(f"--node-seconds '{cut(text)}': write it as NODE=SECONDS, for example actor.update=81")
    return given


def costs_of(program: Program, given: Assumptions) -> Costs:
    """Returns the costs of a config's flow."""
    config = program.config
    longest = config.rollout.max_tokens
    if not 0 <= given.spread <= 3:
        raise ConfigError(f"--spread: {given.spread:g}; it is a standard deviation of logarithms, 0 to 3")
    if given.prompt_tokens is not None and not 0 <= given.prompt_tokens < float("inf"):
        raise ConfigError(f"--prompt-tokens: {given.prompt_tokens:g}; give a number of tokens, 0 or more")
    mean = longest / 2 if given.response_tokens is None else given.response_tokens
    if not 0 < mean <= longest:
        raise ConfigError(f"--response-tokens: {mean:g}; the config allows 1 to {longest} (rollout.max_tokens)")
    limit = config.data.max_prompt
    prompt = min(PROMPT_TOKENS, limit or PROMPT_TOKENS) if given.prompt_tokens is None else given.prompt_tokens
    return Costs(
        seconds=given.node_seconds,
        models=_models(program, given),
        fields={f: KNOWN_FIELDS[f] for f in KNOWN_FIELDS} | {f: FieldBytes(sample=n) for f, n in config.bytes.items()},
        prompt_tokens=prompt,
        response_tokens=mean,
        max_tokens=longest,
        spread=given.spread,
        seed=config.seed,
        dtype_bytes=4 if config.train.dtype == "float32" else 2,
        micro_tokens=config.train.micro_tokens,
        gradient_checkpointing=config.train.gradient_checkpointing,
        offload=config.train.offload,
        max_sequences=config.rollout.max_sequences,
        kv_cache=config.rollout.kv_cache_gb * (1 << 30),
        shard=config.train.shard_degree,
    )


def _models(program: Program, given: Assumptions) -> dict[str, ModelShape]:
    """Returns the model of each role that has one."""
    config = program.config
    main: ModelConfig | str | None = given.model or config.model
    critic = config.critic.model
    reward = config.reward.model if config.reward else None
    sources = {"actor": main, "reference": main, "critic": critic or main, "reward_model": main, "reward": reward}
    roles = {n.role for n in program.flow.nodes if n.method and n.type != "compute"}
    return {role: shape_of(m, config.base) for role, m in sources.items() if m is not None and role in roles}
