"""The memory of a worker, by hand: weights, gradients and both moments of Adam are there between steps."""

from dataclasses import replace

import pytest

from distflow.device.footprint import CONTEXT
from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Workload, plan
from distflow.simulate import Costs, ModelShape
from distflow.simulate.hardware import load_hardware
from distflow.simulate.memory import Memory, memory_of

MODEL = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10)
NODES = (
    Node("generate", role="actor", type="inference", writes=("x",), generates=True, method=True),
    Node("ref", role="reference", type="inference", reads=("x",), writes=("r",), method=True),
    Node("update", role="actor", type="train", reads=("x", "r"), method=True),
)


def memory(dp: int = 1, tp: int = 1, rank: int = 0, places: dict[str, Place] | None = None, **costs: object) -> Memory:
    sets = {"first": "0", "rest": "1-"} if places else {}
    placement = Placement(dp * tp, sets, Place(tp=tp), {}, places or {})
    p = plan(Flow("flow", (), NODES), placement, Workload(4, 1, {"x": 8, "r": 8}))
    models = {"actor": MODEL, "reference": MODEL}
    given = Costs(**{"models": models, "kv_cache": 1000.0, **costs})  # type: ignore[arg-type]
    return memory_of(p, rank, given, load_hardware("namespaces"))


def test_a_trained_parameter_takes_12_bytes_between_steps_and_a_frozen_one_those_of_its_dtype() -> None:
    assert memory().state == pytest.approx((4 + 8 + 2) * MODEL.params)
    assert memory(dtype_bytes=4).state == pytest.approx((12 + 4) * MODEL.params)
    assert memory(offload="optimizer").state == pytest.approx((4 + 2) * MODEL.params)
    assert memory(offload="all").state == 0


def test_its_gradient_takes_4_bytes_while_it_is_trained() -> None:
    assert memory().training > 4 * MODEL.params


def test_shards_and_tensor_parallelism_divide_the_state() -> None:
    whole = memory().state
    assert memory(dp=4).state == pytest.approx(whole / 4)
    assert memory(dp=4, shard=2).state == pytest.approx(whole / 2)
    assert memory(dp=2, tp=2).state == pytest.approx(14 * MODEL.rank_params(2) / 2)


def test_an_engine_has_whole_weights_and_a_cache() -> None:
    rest = memory(dp=4).generation - (2 * MODEL.params + 1000)
    assert rest > 0  # sampling, and the prefill
    assert memory(dp=4, kv_cache=5000.0).generation == pytest.approx(2 * MODEL.params + 5000 + rest)


def test_a_worker_has_only_what_its_own_nodes_need() -> None:
    split = {"generate": Place("first"), "ref": Place("rest"), "update": Place("rest")}
    engine, trainer = (memory(dp=3, rank=r, places=split) for r in (0, 1))
    assert (engine.state, engine.training) == (0, 0)
    assert trainer.generation == 0
    assert trainer.state == pytest.approx(14 * MODEL.params / 2)


def test_generation_and_training_do_not_need_their_memory_at_once() -> None:
    assert Memory(10.0, 5.0, 7.0).peak == 17.0
    assert Memory(10.0, 9.0, 7.0).peak == 19.0


def test_checkpointing_keeps_the_inputs_of_layers_only() -> None:
    def kept(checkpointing: bool) -> float:
        short, long = (
            memory(micro_tokens=n, gradient_checkpointing=checkpointing).training for n in (10**6, 2 * 10**6)
        )
        return (long - short) / 10**6

    assert kept(True) < kept(False)


def test_an_accelerator_has_a_context() -> None:
    p = plan(Flow("flow", (), NODES), Placement(1), Workload(4, 1, {"x": 8, "r": 8}))
    costs = Costs(models={"actor": MODEL, "reference": MODEL})
    ours, theirs = (memory_of(p, 0, costs, load_hardware(name)) for name in ("h100", "namespaces"))
    assert ours.state == theirs.state + CONTEXT


def test_a_sequence_longer_than_a_micro_batch_is_in_one_all_the_same() -> None:
    nodes = tuple(replace(n, sequence_parallel=not n.generates) for n in NODES)

    def training(longest: float, sp: int = 1) -> float:
        p = plan(Flow("flow", (), nodes), Placement(4, {}, Place(sp=sp)), Workload(4, 1, {"x": 8, "r": 8}))
        costs = Costs(models={"actor": MODEL, "reference": MODEL}, micro_tokens=1000, max_tokens=longest)
        return memory_of(p, 0, replace(costs, response_tokens=longest), load_hardware("namespaces")).training

    assert training(500) == training(1000) < training(4000)
    assert training(4000, sp=4) == training(1000)
    assert training(16_000, sp=4) == training(4000)
