"""The map of a checkpoint's files: without gaps, and each reader opens a handful of them, whatever the layouts."""

import json
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.checkpoint.tensor_index import StoredTensor, TensorIndex
from distflow.plan.layout import Layout
from distflow.weights.shards import Shards, TensorSpec, overlap
from distflow.weights.state import RoleState

F32 = torch.float32


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    shard, replicas, tp = draw(st.integers(1, 6)), draw(st.integers(1, 10)), draw(st.sampled_from([1, 2, 4]))
    return shard * replicas, tp, shard


def shards_of(layout: tuple[int, int, int], first: int = 0) -> Shards:
    dp, tp, shard = layout
    return Shards(Layout(tuple(range(first, first + dp * tp)), dp, tp), shard)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    result = []
    for i in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        result.append(TensorSpec(f"t{i}", tuple(4 * n if d == dim else n for d, n in enumerate(shape)), dim))
    return result


def index_of(specs: list[TensorSpec], layout: tuple[int, int, int]) -> TensorIndex:
    tensors = {s.name: StoredTensor(s.shape, F32, bool(s.shape), s.tp_dim) for s in specs}
    return TensorIndex(tensors, *layout)


@settings(deadline=None)
@given(specs(), layouts())
def test_every_element_is_in_one_file_of_a_rank_that_has_it(
    specs: list[TensorSpec], layout: tuple[int, int, int]
) -> None:
    index, shards = index_of(specs, layout), shards_of(layout)
    count = {s.name: torch.zeros(s.shape) for s in specs}
    by_name = {s.name: s for s in specs}
    for rank in shards.layout.ranks:
        for name, box in index.owned(rank).items():
            assert box == shards.box(by_name[name], rank)
            count[name][tuple(slice(*b) for b in box)] += 1
    assert all((c == 1).all() for c in count.values())


@settings(deadline=None)
@given(specs(), layouts(), layouts())
def test_a_reader_of_any_layout_finds_its_part_once(
    specs: list[TensorSpec], written: tuple[int, int, int], read: tuple[int, int, int]
) -> None:
    index, reader = index_of(specs, written), shards_of(read, first=3)
    owned = [index.owned(place) for place in range(written[0] * written[1])]
    for spec in specs:
        for rank in reader.layout.ranks:
            box = reader.box(spec, rank)
            filled = torch.zeros(spec.shape)
            for piece in index.pieces(spec.name, box):
                assert owned[piece.place][spec.name] == piece.part
                assert overlap(piece.part, box) == piece.inner
                filled[tuple(slice(*b) for b in piece.inner)] += 1
            assert (filled[tuple(slice(*b) for b in box)] == 1).all()
            assert filled.sum() == prod(hi - lo for lo, hi in box)


@settings(deadline=None)
@given(specs(), layouts())
def test_an_index_is_read_as_it_was_written(specs: list[TensorSpec], layout: tuple[int, int, int]) -> None:
    index = index_of(specs, layout)
    assert TensorIndex.from_json(index.to_json()) == index
    state = RoleState(
        {},
        {s.name: torch.empty([hi - lo for lo, hi in shards_of(layout).box(s, 0)]) for s in specs},
        {s.name: s for s in specs},
        shards_of(layout),
    )
    assert TensorIndex.of(state) == index


def qwen2_7b() -> list[TensorSpec]:
    """The parameters of Qwen2.5-7B, and the moments of the optimiser."""
    hidden, wide, kv, words = 3584, 18944, 512, 152064
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {
        "self_attn.q_proj.weight": ((hidden, hidden), 0),
        "self_attn.q_proj.bias": ((hidden,), 0),
        "self_attn.k_proj.weight": ((kv, hidden), 0),
        "self_attn.k_proj.bias": ((kv,), 0),
        "self_attn.v_proj.weight": ((kv, hidden), 0),
        "self_attn.v_proj.bias": ((kv,), 0),
        "self_attn.o_proj.weight": ((hidden, hidden), 1),
        "mlp.gate_proj.weight": ((wide, hidden), 0),
        "mlp.up_proj.weight": ((wide, hidden), 0),
        "mlp.down_proj.weight": ((hidden, wide), 1),
        "input_layernorm.weight": ((hidden,), None),
        "post_attention_layernorm.weight": ((hidden,), None),
    }
    names = {f"layers.{i}.{name}": spec for i in range(28) for name, spec in layer.items()}
    names |= {"embed_tokens.weight": ((words, hidden), None), "norm.weight": ((hidden,), None)}
    names |= {"lm_head.weight": ((words, hidden), None)}
    return [TensorSpec(f"{kind}.{n}", *s) for n, s in names.items() for kind in ("weights", "exp_avg", "exp_avg_sq")]


def opened(specs: list[TensorSpec], written: tuple[int, int, int], read: tuple[int, int, int]) -> int:
    """Returns how many files of tensors one rank opens at most."""
    index, reader = index_of(specs, written), shards_of(read)
    ranks = reader.layout.ranks
    some = {ranks[i * (len(ranks) - 1) // 40] for i in range(41)}
    return max(len({p.place for s in specs for p in index.pieces(s.name, reader.box(s, r))}) for r in some)


@pytest.mark.parametrize(
    ("written", "read", "most"),
    [
        ((1024, 1, 1024), (1024, 1, 1024), 1),
        ((512, 2, 512), (512, 2, 512), 2),  # its own, and that of the rank that writes what both have
        ((128, 8, 128), (128, 8, 128), 2),
        ((1024, 1, 64), (1024, 1, 64), 8),  # the replicas of a shard share the writing
        ((1024, 1, 1024), (512, 1, 512), 10),
        ((512, 1, 512), (1024, 1, 1024), 8),
        ((1024, 1, 1024), (256, 4, 256), 20),
        ((256, 4, 256), (1024, 1, 1024), 16),
        ((256, 4, 256), (512, 2, 512), 10),
        ((1024, 1, 1024), (1023, 1, 1023), 8),
        ((8192, 1, 8192), (4096, 2, 4096), 12),
    ],
)
def test_a_worker_opens_a_handful_of_a_thousand_files(written: Any, read: Any, most: int) -> None:
    assert opened(qwen2_7b(), written, read) <= most


def test_replicas_share_the_writing() -> None:
    index = index_of(qwen2_7b(), (1024, 1, 64))
    sizes = [sum(prod(hi - lo for lo, hi in b) for b in index.owned(p).values()) for p in range(0, 1024, 64)]
    assert min(sizes[:8]) > 0.5 * sum(sizes) / 8
    assert not any(sizes[8:])


@pytest.mark.parametrize(
    "change",
    [
        {"dp": 0},
        {"dp": True},
        {"dp": 1.0},
        {"tp": 1 << 30},
        {"shard": 3},
        {"shard": None},
        {"tensors": []},
        {"tensors": {"a": {}}},
        {"tensors": {"a": {"shape": [-1], "dtype": "float32", "cut": True, "tp_dim": None}}},
        {"tensors": {"a": {"shape": [1 << 40, 1 << 40], "dtype": "float32", "cut": True, "tp_dim": None}}},
        {"tensors": {"a": {"shape": [3, 3], "dtype": "float32", "cut": True, "tp_dim": 0}}},
        {"tensors": {"a": {"shape": [4], "dtype": "float32", "cut": True, "tp_dim": -1}}},
        {"tensors": {"a": {"shape": [4], "dtype": "float32", "cut": 1, "tp_dim": None}}},
        {"tensors": {"a": {"shape": [4], "dtype": "object", "cut": False, "tp_dim": None}}},
        {"tensors": {"a": {"shape": [], "dtype": "float32", "cut": True, "tp_dim": None}}},
    ],
)
def test_an_index_that_cannot_be_is_refused(change: Any) -> None:
    whole = {"dp": 4, "tp": 2, "shard": 2, "tensors": {}}
    assert TensorIndex.from_json(json.dumps(whole)).dp == 4
    with pytest.raises(ValueError, match="the index of the tensors"):
        TensorIndex.from_json(json.dumps(whole | change))
