"""Decoding on a CPU reads the cache in blocks of slots, which cost no more than one block of all."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.cpu import decode_attention
from distflow.cpu.decode_attention import split_slots
from rollout.plain_loop import expected, generate, generator, same
from tiny import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reading_the_cache_in_small_blocks_gives_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_CALL", 0)
    monkeypatch.setattr(decode_attention, "_SMALLEST", 1)
    assert same(generate(generator(arch, 8)), expected(arch))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=200), st.sampled_from([0, 40, 512]))
@settings(deadline=None)
def test_blocks_cover_the_slots_and_read_no_more_than_one_would(lengths: list[int], call: int) -> None:
    with patch.object(decode_attention, "_CALL", call):
        cost, blocks = split_slots(np.array(lengths), 0, len(lengths))
    assert [i for lo, hi in blocks for i in range(lo, hi)] == list(range(len(lengths)))
    assert cost == sum((hi - lo) * max(lengths[lo:hi]) + call for lo, hi in blocks)
    assert cost <= len(lengths) * max(lengths) + call
