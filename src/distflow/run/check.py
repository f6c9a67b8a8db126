"""Checks in one process everything that can go wrong before the first step: what `distflow check` prints."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from distflow.config import Config
from distflow.dataset.view import DatasetView
from distflow.device.choices import Choice
from distflow.errors import ConfigError, shown
from distflow.plan import Plan
from distflow.plan.field_bytes import IMAGES
from distflow.run.choosing import choose_for, placed
from distflow.run.program import MODEL_ROLES, Program
from distflow.util.text import human_bytes


def check(program: Program) -> Iterator[str]:
    """Yields a line for each thing that is right; raises the first one that is wrong."""
    from distflow.train.update_spec import check_losses

    config = program.config
    program.check_installed()
    workers = config.workers or 1
    program, choices = _placed(program, workers)
    plan = program.plan(workers)
    nodes = ", ".join(n.id for n in plan.flow.order)
    yield f"flow      {plan.flow.name}: {nodes}"
    samples = f"{plan.samples} samples per step ({config.data.batch} prompts × {program.repeat})"
    yield f"plan      {workers} {'worker' if workers == 1 else 'workers'}, {samples}"
    for choice in choices:
        yield f"chosen    {choice}"
    rows = program.dataset(plan)
    yield f"data      {len(rows)} rows, {rows.dataset.skipped_count} skipped; columns {', '.join(rows.column_names)}"
    held_out, plans = program.eval_dataset(), [plan]
    if config.eval and held_out:
        plans.append(program.eval_plan(workers, len(held_out)))
        yield f"eval      {len(held_out)} rows every {config.eval.every} steps"
    check_losses(plan.flow, config.base)
    yield from _check_rewards(program, plans, [rows[0], *([held_out[0]] if held_out else [])])
    if config.model:
        yield from _check_model(program, plan, rows, held_out)


def _placed(program: Program, workers: int) -> tuple[Program, tuple[Choice, ...]]:
    """Returns the program with what is chosen for the devices that are here."""
    from distflow.cluster.world import own_device
    from distflow.device.offer import whole_offer

    return placed(program, workers, whole_offer(own_device())) if program.config.model else (program, ())


def _check_model(program: Program, plan: Plan, rows: DatasetView, held_out: DatasetView | None) -> Iterator[str]:
    """Checks the model and all prompts."""
    from distflow.agents.setup_check import check_environments
    from distflow.cluster.world import own_device
    from distflow.device.offer import offer_of
    from distflow.model.images import open_images
    from distflow.model.lora import LoraAdapter
    from distflow.model.memory import check_kv_cache, kv_budget
    from distflow.model.prompt_check import check_prompts, texts
    from distflow.model.sequence_parallel import check_divisible
    from distflow.model.source import DTYPES, kv_bytes, open_model
    from distflow.model.tensor_parallel import tp_styles
    from distflow.model.text import Text, prompt_limit
    from distflow.roles.policy import check_router_replay
    from distflow.rollout.agreement import difference
    from distflow.rollout.engine import load_engine

    config = program.config
    assert config.model is not None
    source = open_model(config.model, lambda: texts(rows), config.base, config.seed)
    device = own_device()
    offer = offer_of(device)
    chosen = choose_for(program, plan, source, device, offer)
    config = chosen.config
    skeleton = source.skeleton()
    count = sum(p.numel() for p in skeleton.parameters())
    layouts = {n.id: plan.partition_of(n.id).layout for n in plan.flow.nodes if n.role in MODEL_ROLES}
    for node, layout in layouts.items():
        tp_styles(skeleton, layout.tp, f"placement of {node}")
        check_divisible(skeleton, layout, f"placement of {node}")
    trained = ""
    if config.train.lora:
        adapter = sum(prod(s.shape) for s in LoraAdapter(skeleton, config.train.lora).specs)
        trained = f" and {adapter:,} of an adapter, which alone are trained"
    parameters = f"{count:,} parameters{trained}, {len(source.tokenizer)} tokens"
    yield f"model     {source.name}: {source.config.model_type}, {parameters}"
    if offer:
        yield f"device    {offer.name}, {human_bytes(offer.memory)} free"
    for choice in chosen.choices:
        yield f"chosen    {choice}"
    yield from _check_other_models(config, plan, source)
    data = config.data
    limit = prompt_limit(source, config.rollout.max_tokens, data.max_prompt)
    images = open_images(source, rows, held_out)
    text = Text(source, limit, data.rendered, data.chat_template_kwargs, images)
    text.stop_tokens(source, config.rollout.stop)
    checked = check_prompts(rows, text, data.on_bad_row == "skip", 0, 1)
    if held_out:
        check_prompts(held_out, text, False, 0, 1)
    first = checked.rows[0]
    tokens = len(text.encode(first["prompt"], first.get(IMAGES, ())))
    lengths = f"have at most {text.limit} tokens, {checked.count} skipped; the first has {tokens}"
    yield f"prompts   all {len(checked.rows)} {lengths}"
    if environments := program.environments:
        both = [rows, *([held_out] if held_out else [])]
        yield from check_environments(environments, config.base, text, config.rollout.max_tokens, both)
    if generates := layouts.get("actor.generate") or layouts.get("actor.converse"):
        check_router_replay(source, config.rollout)
        load_engine(config.rollout.engine).check(source, config.rollout, device, config.train.lora)
        per_token = kv_bytes(source.config, DTYPES[config.train.dtype], generates.tp)
        size = int(config.rollout.kv_cache_gb * (1 << 30))
        check_kv_cache(size, device)
        needed = per_token * (tokens + config.rollout.max_tokens)
        if needed > size:
            raise ConfigError(
                f"rollout.kv_cache_gb: the first prompt and its response need {human_bytes(needed)} of KV cache and"
                f" there are {human_bytes(size)}; raise it, or lower rollout.max_tokens"
            )
        longest = text.limit + config.rollout.max_tokens
        yield f"kv cache  {kv_budget(size, per_token, longest, config.rollout.max_sequences)}"
        places = [layout for node, layout in layouts.items() if node.startswith("actor.")]
        why = difference(config.rollout.engine, source, config.train.dtype, device, *places)
        why = "train.compile merges operations of the trainer alone" if config.train.compile else why
        agreement = f"may differ in their last bits: {why}" if why else "are the same to the bit"
        yield f"log-probs of rollout and trainer {agreement}"


def _check_other_models(config: Config, plan: Plan, main: Any) -> Iterator[str]:
    """Checks the models of the critic and the reward, if they have their own."""
    from distflow.roles.reward_scorer import check_reward_model
    from distflow.roles.second_model import open_second_model

    roles = {n.role for n in plan.flow.nodes}
    for name, role in config.roles.items():
        if name in roles and role.model:
            yield f"{name:<10}{open_second_model(name, role.model, config.base, config.seed, main).name}, not trained"
    if "critic" in roles and config.critic.model:
        yield f"critic    {open_second_model('critic', config.critic.model, config.base, config.seed, main).name}"
    if "reward" in roles and config.reward and config.reward.model:
        reward = open_second_model("reward", config.reward.model, config.base, config.seed, main)
        check_reward_model("reward", reward)
        yield f"reward    the model {reward.name}"


def _check_rewards(program: Program, plans: Sequence[Plan], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Scores an empty response, and a plausible one, to the first row of each plan with the rewards of its flow."""
    from distflow.reward.reward import Reward

    rewards: dict[str, Reward] = {}
    try:
        for plan, row, where in zip(plans, rows, ("", "eval: "), strict=False):
            for node in (n for n in plan.flow.nodes if n.method):
                if program.implementation(node.role) is not Reward:
                    continue
                if node.role not in rewards:
                    args = program.role_bindings[node.role].args
                    rewards[node.role] = Reward(**args | {"log": None, "base": Path(program.config.base)})
                fields = [node.local_name(f) for f in node.reads]
                rewards[node.role].check_fields(fields, where)
                answer = reference_answer(row, program.config.reward.answer if program.config.reward else None)
                scores = []
                for response in ("", answer):
                    generated = {"response": response, "response_tokens": []}
                    sample = {f: v for f, v in {**row, **generated}.items() if f in fields}
                    scores.append(rewards[node.role].score_one(sample, "of the first row"))
                kind, of = ("held-out", "held-out prompt") if where else ("reward", "prompt")
                empty, plausible = scores
                yield f"{kind:10}{empty:g} for an empty response to the first {of}, {plausible:g} for {shown(answer)}"
    finally:
        for reward in rewards.values():
            reward.close()


def reference_answer(row: Mapping[str, Any], column: str | None) -> str:
    """Returns the right answer of a row, where such rows have one, or else some text."""
    of_verl = row.get("reward_model")
    places = [row.get(column or ""), of_verl.get("ground_truth") if isinstance(of_verl, Mapping) else None]
    places += [row.get(name) for name in ("answer", "solution", "ground_truth", "label")]
    return next((str(value) for value in places if isinstance(value, str | int | float)), "The answer is 42.")
