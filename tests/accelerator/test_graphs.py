"""Decoding that is recorded once and replayed gives what decoding kernel by kernel gives."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from accelerator.graphs import Graph
from accelerator.rehearse import DEVICE, REHEARSED, rehearse
from accelerator.scenarios import PARAMS, Case, Generated, fill_weights, generate, make_engine
from distflow.rollout.builtin import decoding_graphs
from distflow.rollout.builtin.decoding_graphs import can_record, padded

NEVER = 1 << 40
CASE = Case("qwen2", dtype="bfloat16")


def generated(rank: int, worth: int, on: bool = True, rounds: int = 1) -> list[tuple[Generated, int]]:
    """Returns what is generated in some rollouts if shapes are recorded from so many uses on, and the replays."""
    results = []
    with patch.object(decoding_graphs, "WORTH", worth):
        engine = make_engine(rank, CASE, DEVICE, slots=3, graphs=on)
        for _ in range(rounds):
            before = Graph.replays
            fill_weights(engine, rank, CASE)  # to other memory than in the round before
            results.append((generate(engine, replace(PARAMS["plain"], max_tokens=30)), Graph.replays - before))
            engine.release_memory(weights=True)
    return results


def all_ways(rank: int) -> dict[str, Any]:
    return {
        "launched": generated(rank, NEVER),
        "recorded": generated(rank, 0, rounds=2),
        "recorded later": generated(rank, 5),
        "switched off": generated(rank, 0, on=False),
    }


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU records nothing")
def test_replayed_steps_generate_the_same_tokens() -> None:
    (found,) = rehearse(1, all_ways)
    ((expected, never),) = found.pop("launched")
    for way, rounds in found.items():
        for got, replays in rounds:
            assert got.tokens == expected.tokens, way
            assert (got.logprobs == expected.logprobs).all() or not REHEARSED
            assert (replays > 0) == (way != "switched off") or not REHEARSED
    assert never == 0
    many, few = (found[way][0][1] for way in ("recorded", "recorded later"))
    assert many > few or not REHEARSED


def test_sequences_are_filled_up_to_few_sizes() -> None:
    assert [padded(n) for n in (1, 2, 3, 5, 33, 64, 65, 128, 1000)] == [1, 2, 4, 8, 64, 64, 128, 128, 1024]
    assert len({padded(n) for n in range(1, 1025)}) < 25


def test_a_cpu_records_nothing() -> None:
    assert not can_record(torch.device("cpu"))
