"""The roofline, by hand, and what may not make a step faster."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import ConfigError
from distflow.flow.graph import Node
from distflow.plan import Layout
from distflow.simulate import Costs, ModelShape, load_hardware, load_model
from distflow.simulate.compute import Times, Work, compute_times, in_lockstep

MODEL = ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10)
H100 = load_hardware(
    "h100",
    device={"flops": 1e6, "memory_rate": 1e6},
    efficiency={
        "linear": 1.0,
        "attention": 0.5,
        "activation_bytes": 3.0,
        "vocab_bytes": 5.0,
        "expert_bytes": 7.0,
        "decode_memory": 1.0,
        "decode_flops": 1.0,
        "decode_step_s": 0.0,
    },
)
GENERATE = Node("g", role="actor", type="inference", generates=True, method=True)
FORWARD = Node("f", role="actor", type="inference", method=True)
TRAIN = Node("t", role="actor", type="train", method=True)


# A device that only ever waits for its memory.
READING = H100.model_copy(update={"device": H100.device.model_copy(update={"flops": 1e15})})


def times(node: Node, lengths: list[float], replicas: int = 1, tp: int = 1, repeat: int = 1, **costs: object) -> Times:
    layout = Layout(tuple(range(replicas * tp)), replicas, tp)
    replica = np.arange(len(lengths)) * replicas // len(lengths)
    work = Work(node, layout, replica, np.array(lengths, float), np.zeros(replicas * tp, np.int64), repeat)
    hardware = READING if node.generates else H100
    return compute_times(work, hardware, Costs(models={"actor": MODEL}, **costs))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "params", "active"),
    [("qwen2.5-7b", 7.62e9, 7.07e9), ("qwen2.5-72b", 72.7e9, 71.5e9), ("qwen3-30b-a3b", 30.5e9, 3.04e9)],
)
def test_parameters_of_known_models(name: str, params: float, active: float) -> None:
    model = load_model(name)
    assert model.params == pytest.approx(params, rel=2e-3)
    assert model.active_params == pytest.approx(active, rel=2e-3)


def test_models_by_their_names_on_the_hub() -> None:
    assert load_model("Qwen/Qwen2.5-Math-7B-Instruct").params == load_model("qwen2.5-7b").params
    with pytest.raises(ConfigError, match=r"'qwen2.5-8b' are not known; did you mean 'qwen2.5-7b'\?"):
        load_model("qwen2.5-8b")


def test_a_forward_pass() -> None:
    products, attention = 2 * MODEL.active_params * 100, 2 * 2 * 8 * 100**2
    moved = (3 * 2 * 8 + 5 * 10) * 100  # by activations of two layers, and by log-probs over ten words
    seconds = (products + attention / 0.5 + moved) / 1e6
    assert times(FORWARD, [60], prompt_tokens=40).elapsed == pytest.approx([seconds])


def test_a_mixture_moves_tokens_to_its_experts_and_back() -> None:
    mixture = MODEL.model_copy(update={"experts": 4, "active": 2})
    work = Work(FORWARD, Layout((0,), 1), np.zeros(1, np.int64), np.array([10.0]), np.zeros(1, np.int64), 1)
    flops = 2 * mixture.active_params * 10 + mixture.attention_flops(np.array(10.0)) / 0.5
    moved = (3 * 2 * 8 + 5 * 10 + 7 * 2 * 2 * 8) * 10
    elapsed = compute_times(work, H100, Costs(models={"actor": mixture})).elapsed
    assert elapsed == pytest.approx([(flops + moved) / 1e6])
    assert mixture.read_experts(np.array([1.0, 1e9])) == pytest.approx([2 * 2 * 3 * 8 * 16, 4 * 2 * 3 * 8 * 16])


def test_training_is_three_or_with_checkpointing_four_passes() -> None:
    one = times(FORWARD, [100]).elapsed[0]
    assert times(TRAIN, [100], gradient_checkpointing=False).elapsed == pytest.approx([3 * one])
    assert times(TRAIN, [100], gradient_checkpointing=True).elapsed == pytest.approx([4 * one])


def test_decoding_reads_weights_and_keys_of_all_running_sequences() -> None:
    weights = MODEL.active_params * 2
    kv = MODEL.kv_elements * 2
    # Ten steps with both, context 0 to 10, then ten with one, context 10 to 20.
    expected = (20 * weights + 10 * 2 * 5 * kv + 10 * 15 * kv) / 1e6
    got = times(GENERATE, [10, 20], kv_cache=1e9).elapsed[0]
    assert got == pytest.approx(expected)


def test_a_prompt_is_read_once_for_all_responses_to_it() -> None:
    one = 2 * MODEL.active_params * 40 / 1e15  # on a device whose memory costs nothing, but for the keys of the prompt

    def prefill(responses: int, repeat: int) -> float:
        """Returns how often the prompt is read."""
        fast = READING.model_copy(update={"device": READING.device.model_copy(update={"memory_rate": 1e40})})
        layout = Layout((0,), 1)
        work = Work(GENERATE, layout, np.zeros(responses, int), np.ones(responses), np.zeros(1, np.int64), repeat)
        seconds = compute_times(work, fast, Costs(models={"actor": MODEL}, prompt_tokens=40)).elapsed[0]
        without = compute_times(work, fast, Costs(models={"actor": MODEL}, prompt_tokens=0)).elapsed[0]
        attention = responses * 40.5 * 4 * MODEL.layers * MODEL.heads * MODEL.head_dim / 1e15
        attention -= responses * 0.5 * 4 * MODEL.layers * MODEL.heads * MODEL.head_dim / 1e15
        return float((seconds - without - attention) / one)

    assert prefill(8, 1) == pytest.approx(8)
    assert prefill(8, 4) == pytest.approx(2)
    assert prefill(8, 8) == pytest.approx(1)


def test_sequences_wait_for_a_slot() -> None:
    together, in_turn = (times(GENERATE, [10, 10, 10], max_sequences=n, kv_cache=1e9).elapsed[0] for n in (3, 1))
    assert 2.5 * together < in_turn < 3.1 * together


def test_given_seconds_replace_the_roofline() -> None:
    assert times(TRAIN, [100] * 4, replicas=2, seconds={"t": 81.0}).elapsed.tolist() == [81.0, 81.0]


def test_mini_batches_wait_for_the_slowest_replica() -> None:
    node = Node("t", role="actor", type="train", method=True, params={"mini_batches": 2})
    lengths = [100.0, 10.0, 10.0, 100.0]
    apart = times(node, lengths, replicas=2)
    whole = times(TRAIN, lengths, replicas=2)
    assert apart.busy == pytest.approx(whole.busy, rel=0.01)
    assert apart.elapsed.max() > 1.5 * whole.elapsed.max()


def test_epochs_take_as_often_as_long_and_so_do_the_waits_in_them() -> None:
    lengths = [100.0, 10.0, 10.0, 100.0]  # in each mini-batch another replica is the slower one

    def train(**params: int) -> Times:
        node = Node("t", role="actor", type="train", method=True, params={"mini_batches": 2, **params})
        return times(node, lengths, replicas=2)

    once, thrice = train(), train(epochs=3)
    assert thrice.busy == pytest.approx(3 * once.busy)
    # Both replicas wait for the slower one after every mini-batch; after the last one, whoever calls does.
    assert thrice.elapsed.max() == pytest.approx(3 * once.elapsed.max())
    assert thrice.elapsed.max() == pytest.approx(6 * once.busy.max() * 100 / 110, rel=0.2)


def test_every_replica_has_a_share_of_each_mini_batch() -> None:
    node = Node("t", role="actor", type="train", method=True, params={"mini_batches": 2})
    whole = times(TRAIN, [50.0] * 8, replicas=2).elapsed[1]
    assert times(node, [50.0] * 8, replicas=2).elapsed[1] == pytest.approx(whole, rel=0.01)


def test_micro_batches_of_samples_wait_for_the_longest_of_all_replicas() -> None:
    lengths = [10.0, 90.0, 90.0, 10.0]  # of two replicas: in both micro-batches one has the long sample
    even = times(TRAIN, lengths, replicas=2, micro_samples=2)
    ragged = times(TRAIN, lengths, replicas=2, micro_samples=1)
    long = times(TRAIN, [90.0]).elapsed[0]
    short = times(TRAIN, [10.0]).elapsed[0]
    assert even.elapsed.max() == pytest.approx(long + short, rel=1e-6)
    assert ragged.elapsed.max() == pytest.approx(2 * long, rel=1e-6)
    assert ragged.busy == pytest.approx([long + short] * 2, rel=1e-6)
    alone = times(TRAIN, lengths, replicas=2, micro_samples=1, shard=1)  # nothing is sharded: nobody waits in between
    assert alone.elapsed.max() == pytest.approx(long + short, rel=1e-6)


def test_mini_batches_that_each_worker_cuts_are_even() -> None:
    """One group per replica: cut by the step's prompts, a mini-batch has samples of one replica only."""
    node = Node("t", role="actor", type="train", method=True, params={"mini_batches": 2})
    whole = times(TRAIN, [50.0] * 8, replicas=2, repeat=4).elapsed.max()
    by_step = times(node, [50.0] * 8, replicas=2, repeat=4).elapsed.max()
    by_worker = times(node, [50.0] * 8, replicas=2, repeat=4, own_mini_batches=True).elapsed.max()
    assert by_step == pytest.approx(2 * whole, rel=0.01)
    assert by_worker == pytest.approx(whole, rel=0.01)


def test_a_collective_goes_around_a_ring_of_all_ranks() -> None:
    slow = load_hardware("h100", network={"rate": 1e15, "latency_s": 1.0}, local={"rate": 1e15, "latency_s": 0.1})
    layout, lengths = Layout(tuple(range(16)), 16), np.ones(16)
    work = Work(FORWARD, layout, np.arange(16), lengths, np.arange(16) // 8, 1)
    elapsed = compute_times(work, slow, Costs(models={"actor": MODEL})).elapsed.max()
    assert elapsed == pytest.approx(MODEL.layers * (1 * 1.0 + 14 * 0.1))  # one step between hosts, 14 within


def test_a_replica_is_as_fast_as_its_slowest_device() -> None:
    even = Work(FORWARD, Layout((0, 1), 2), np.array([0, 1]), np.full(2, 60.0), np.zeros(2, np.int64), 1)
    work = replace(even, slowness=np.array([1.0, 1.5]))
    first, second = compute_times(work, H100, Costs(models={"actor": MODEL}, shard=1)).busy
    assert second == pytest.approx(1.5 * first)


def test_who_waits_for_whom() -> None:
    work = Work(TRAIN, Layout((0, 1), 2), np.array([0, 1]), np.ones(2), np.zeros(2, np.int64), 1)
    assert in_lockstep(work, Costs(models={"actor": MODEL}))
    assert not in_lockstep(work, Costs(models={"actor": MODEL}, seconds={"t": 1.0}))


_lengths = st.lists(st.floats(1, 500), min_size=4, max_size=16)


@given(_lengths, st.sampled_from([GENERATE, FORWARD, TRAIN]))
@settings(max_examples=50)
def test_longer_responses_never_take_less_time(lengths: list[float], node: Node) -> None:
    longer = [x * 1.5 for x in lengths]
    assert times(node, longer).elapsed[0] >= times(node, lengths).elapsed[0] - 1e-9


@given(st.floats(10, 1000), st.floats(0, 1.5), st.integers(1, 500), st.integers(0, 99))
def test_lengths_have_the_mean_that_was_asked_for(mean: float, spread: float, samples: int, seed: int) -> None:
    costs = Costs(response_tokens=mean, max_tokens=4 * mean, spread=spread, seed=seed)
    lengths = costs.response_lengths(samples)
    assert lengths.mean() == pytest.approx(mean, rel=1e-6)
    assert lengths.max() <= 4 * mean
    assert (lengths == costs.response_lengths(samples)).all()
