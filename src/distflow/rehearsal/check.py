"""Prints `distflow check --memory`: the memory of each phase of a step, whether it fits, and what to change."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from distflow.cluster.world import own_device
from distflow.config.model_shape import ModelShape, load_model
from distflow.config.schema import Config, ModelConfig
from distflow.device.choices import Choice, unlike_ranks
from distflow.device.footprint import FITS, ROLLOUT, Phase
from distflow.device.offer import Offer, offer_of
from distflow.errors import ConfigError, cut
from distflow.model.source import Source, find_folder, open_model
from distflow.model.tokenizer import train_tokenizer
from distflow.plan import Plan
from distflow.plan.layout import ranks_text
from distflow.rehearsal.memory import WEIGHT_SYNC, phases_of_worker
from distflow.run.choosing import choose_for, placed
from distflow.run.program import Program
from distflow.util.text import human_bytes

_UNITS = {"": 1 << 30, "GIB": 1 << 30, "GB": 10**9, "MIB": 1 << 20, "MB": 10**6}
_PARTS = 6  # of a phase that a line names
_SMALL = 0.01  # of the memory: a part that a line leaves out


def check_memory(program: Program, size: str) -> Iterator[str]:
    """Yields a line for each phase of each kind of rank; raises if one does not fit. `size`: see `offer_for`."""
    config, workers = program.config, program.config.workers or 1
    if config.model is None:
        raise ConfigError("--memory: the config has no model; give one: `model: name-or-directory`")
    offer = offer_for(size)
    walked = walk(program, workers, offer, torch.device(offer.kind))
    plan = walked.plan
    yield f"device    {offer.name}, {human_bytes(offer.memory)} each, {workers} of them"
    for choice in walked.choices:
        yield f"chosen    {choice}"
    chains = plan.chains()
    problems = []
    for rank, phases in walked.phases:
        alike = next(ranks for ranks in chains if rank in ranks)
        yield f"ranks     {ranks_text(alike)}"
        for phase in phases:
            yield f"  {phase.name:<24} {human_bytes(phase.bytes):>9}  {_parts_of(phase, offer.memory)}"
        if phases:
            worst = max(phases, key=lambda p: p.bytes)
            problems += [(rank, p) for p in phases if p.bytes > FITS * offer.memory]
            yield f"  {'peak':<24} {human_bytes(worst.bytes):>9}  in {worst.name}"
    if problems:
        raise ConfigError(_advice(plan, problems, offer.memory))
    yield f"memory    every phase fits into {FITS:.0%} of {human_bytes(offer.memory)}"


@dataclass(frozen=True)
class Walked:
    """A run on devices that are not here."""

    plan: Plan
    config: Config  # with what is chosen for the devices
    choices: tuple[Choice, ...]
    phases: Iterator[tuple[int, list[Phase]]]  # of a rank of each kind, which is walked when it is asked for

    def peaks(self) -> dict[str, float]:
        """Walks them; returns the most bytes that a rank needs to train, and while it generates or gets weights."""
        peaks = {"training": 0.0, ROLLOUT: 0.0}
        for phase in (p for _, phases in self.phases for p in phases):
            key = ROLLOUT if phase.name == ROLLOUT or phase.name.startswith(WEIGHT_SYNC) else "training"
            peaks[key] = max(peaks[key], phase.bytes)
        return peaks


def walk(program: Program, workers: int, offer: Offer | None, device: torch.device) -> Walked:
    """Plans the run of a model on devices that offer this; None: on CPUs. `device`: one as theirs."""
    program, placement = placed(program, workers, offer)
    assert program.config.model
    plan, source = program.plan(workers), shape_source(program.config.model, program)
    chosen = choose_for(program, plan, source, device, offer)
    phases = ((r, phases_of_worker(program, chosen.config, source, plan, r)) for r in unlike_ranks(plan))
    return Walked(plan, chosen.config, (*placement, *chosen.choices), phases)


def offer_for(size: str) -> Offer:
    """Returns what a device with this much memory offers, such as 80GiB; "": the one that is here."""
    if not size:
        if offer := offer_of(own_device()):
            return offer
        raise ConfigError("--memory: there is no accelerator here; say how large yours are, for example --memory 80GiB")
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", size)
    try:
        assert match
        return Offer("cuda", "a device that is not here", int(float(match[1]) * _UNITS[match[2].upper()]), True)
    except (AssertionError, KeyError, ValueError):
        raise ConfigError(f"--memory '{cut(size)}': write a size such as 80GiB or 80GB") from None


def shape_source(given: ModelConfig, program: Program) -> Source:
    """Returns the model of a config without its weights and tokenizer, which need not be here."""
    if given.arch is not None:
        source = open_model(given, lambda: iter(("some text",)), program.config.base, program.config.seed)
        source.config.get_text_config().vocab_size = given.vocab  # and not what this text has
        return source
    assert given.path is not None
    tokenizer = train_tokenizer(iter(("some text",)), 0)
    try:
        folder = find_folder(given.path, program.config.base, files="config.json")
    except ConfigError:
        try:
            shape = load_model(given.path)
        except ConfigError:
            shape = None
        if shape is None:
            raise
        return Source(given.path, config_from(shape), tokenizer)
    return Source(given.path, AutoConfig.from_pretrained(folder), tokenizer)


def config_from(shape: ModelShape) -> Any:
    """Returns the config of a model of this shape."""
    moe = {"num_experts": shape.experts, "num_experts_per_tok": shape.active, "moe_intermediate_size": shape.ffn}
    return AutoConfig.for_model(
        "qwen3_moe" if shape.experts > 1 else "qwen2",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        **(moe if shape.experts > 1 else {}),
    )


def _parts_of(phase: Phase, memory: int) -> str:
    large = [(name, size) for name, size in phase.parts.items() if size >= _SMALL * memory]
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in large[:_PARTS])


def _advice(plan: Plan, problems: Sequence[tuple[int, Phase]], memory: int) -> str:
    """Says what does not fit, and what would be smaller."""
    rank, worst = max(problems, key=lambda p: p[1].bytes)
    largest = max(worst.parts, key=lambda name: worst.parts[name])
    generates = next((n.id for n in plan.flow.nodes if n.generates), None)
    ways = ["use more workers"]
    if worst.name == ROLLOUT or worst.name.startswith(WEIGHT_SYNC):
        ways = [f"raise tp of {generates} (placement.nodes.{generates}.tp)", "lower rollout.kv_cache_gb", *ways]
    elif "activations" in largest:
        ways = ["lower train.micro_tokens or rollout.max_tokens", "set train.gradient_checkpointing", *ways]
    else:
        ways = ["set train.offload: all", "place the node with tp", *ways]
    return (
        f"memory: {worst.name} needs {human_bytes(worst.bytes)} on rank {rank}, and {human_bytes(FITS * memory)} of"
        f" {human_bytes(memory)} can be used; most of it is {largest}, {human_bytes(worst.parts[largest])}:"
        f" {'; '.join(ways)}"
    )
