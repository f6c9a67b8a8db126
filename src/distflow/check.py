"""Everything that can go wrong before the first step, tried in one process: what `distflow check` prints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distflow.config import REWARD, Config
from distflow.data.rows import Rows
from distflow.data.view import View
from distflow.errors import ConfigError
from distflow.plan.units import human_bytes


def check(config: Config) -> Iterator[str]:
    """A line for each thing that holds; the first one that does not is raised."""
    workers = config.workers or 1
    plan = config.plan(workers)
    nodes = ", ".join(n.id for n in plan.flow.order)
    yield f"flow      {plan.flow.name}: {nodes}"
    yield f"plan      {workers} workers, {plan.samples} samples a step ({config.data.batch} prompts × {config.repeat})"
    rows = View(Rows(config.files, on_bad_row=config.data.on_bad_row), config.data.rename)
    yield f"data      {len(rows)} rows, {rows.rows.skipped_count} skipped; columns {', '.join(rows.names)}"
    if config.model:
        yield from _model(config, rows)
    for n in plan.flow.nodes:
        if isinstance(n.params.get("loss"), str):
            from distflow.flow.call import load

            load(n.params["loss"], f"node '{n.id}': loss", config.base)
    if config.reward and config.cast["reward"].call == REWARD:
        yield from _reward(config, rows[0])
    if config.eval:
        held_out = Rows(config.eval_files)
        config.eval_plan(workers, len(held_out))
        yield f"eval      {len(held_out)} rows every {config.eval.every} steps"


def _model(config: Config, rows: View) -> Iterator[str]:
    from distflow.engine.model import DTYPES, kv_bytes, open_model
    from distflow.engine.policy import prompt_limit
    from distflow.engine.screen import screen, texts
    from distflow.engine.text import Text

    assert config.model is not None
    source = open_model(config.model, lambda: texts(rows), config.base, config.seed)
    skeleton = source.skeleton()
    count = sum(p.numel() for p in skeleton.parameters())
    yield f"model     {source.name}: {source.config.model_type}, {count:,} parameters, {len(source.tokenizer)} tokens"
    text = Text(source, prompt_limit(config, source))
    text.stop_tokens(source, config.rollout.stop)
    seen = screen(rows, text, config.data.on_bad_row == "skip", 0, 1)
    first = text.encode(rows[0]["prompt"])
    yield f"prompts   {len(seen.rows)} of at most {text.limit} tokens, {seen.count} skipped; the first has {len(first)}"
    per_token = kv_bytes(source.config, DTYPES[config.train.dtype], 1)
    need = per_token * (len(first) + config.rollout.max_tokens)
    room = int(config.rollout.kv_cache_gb * (1 << 30))
    if need > room:
        raise ConfigError(
            f"rollout.kv_cache_gb: the first prompt and its response need {human_bytes(need)} of KV cache and there"
            f" are {human_bytes(room)}; raise it, or lower rollout.max_tokens"
        )
    yield f"kv cache  {human_bytes(room)}: {room // need} sequences like the first"


def _reward(config: Config, row: dict[str, Any]) -> Iterator[str]:
    from distflow.reward.reward import Reward

    args = config.cast["reward"].args | {"log": None, "base": Path(config.base)}
    reward = Reward(**args)
    try:
        score = reward.try_one({**row, "response": ""})
    finally:
        reward.close()
    yield f"reward    {score:g} for an empty response to the first prompt"
