"""The rehearsal finds mistakes: each of these, planted in the engine, fails on the device."""

import inspect
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from accelerator import races
from accelerator.overlap import overlap
from accelerator.rehearse import DEVICE, REHEARSED, rehearse
from accelerator.scenarios import (
    PARAMS,
    Case,
    exchange,
    fill_weights,
    generate,
    make_engine,
    make_trainer,
    roll_out,
    save_and_restore,
    sync_weights,
    train,
    update,
)
from distflow.comm.streams import finish
from distflow.rollout.builtin import decoding_graphs

pytestmark = pytest.mark.skipif(not REHEARSED, reason="tests the rehearsal itself")


def check_training(rank: int) -> None:
    (_, ours), (_, theirs) = train(rank, Case())
    assert np.abs(ours - theirs).mean() < 1e-4, "the device learns something else"


def check_rollout(rank: int) -> None:
    for ours, theirs in roll_out(rank, Case("mistral"), ("plain", "min tokens")).values():
        assert ours.tokens == theirs.tokens, "the device generates something else"
        assert ours.waits <= 1, "the host waits for the device more than once per forward pass"


def check_checkpoint(rank: int) -> None:
    with TemporaryDirectory() as folder:
        continued, restored = save_and_restore(rank, Case(), folder)
    assert (continued == restored).all()


def check_exchange(rank: int) -> None:
    exchange(rank, "1")


def check_overlap(rank: int) -> None:
    overlap(rank)


def check_offload(rank: int) -> None:
    """Compares what is in host memory after an update with what is there once the device has been waited for."""
    for offload in ("optimizer", "all"):
        trainer = make_trainer(rank, Case(offload=offload), DEVICE)
        update(trainer, rank, Case())
        assert trainer.optimizer
        held = [state["exp_avg"] for state in trainer.optimizer.state.values()]
        held += trainer.host.host.values() if trainer.host else []
        now = [t.clone() for t in held]
        finish(torch.device(DEVICE))
        assert all(torch.equal(a, b) for a, b in zip(now, held, strict=True)), "the host reads something else"


def check_graphs(rank: int) -> None:
    results = []
    for worth in (0, 1 << 40):
        with patch.object(decoding_graphs, "WORTH", worth):
            engine = make_engine(rank, (case := Case("qwen2", dtype="bfloat16")), DEVICE, slots=3)
            fill_weights(engine, rank, case)
            results.append(generate(engine, PARAMS["plain"]).tokens)
    assert results[0] == results[1], "a replay generates something else"


@dataclass(frozen=True)
class Plant:
    """Code of a function, and the mistake that replaces it."""

    check: Callable[[int], None]
    function: str  # module:name, in distflow
    code: str
    mistake: str
    error: str = "MixedDevicesError|Expected all tensors to be on the same device"

    @property
    def workers(self) -> int:
        return 2 if self.check in (sync_weights, check_exchange, check_overlap) else 1


PLANTS = {
    "fields of a micro-batch stay in host memory": Plant(
        check_training, "train.packing:Pack.to", "{k: to_device(v, device) for k, v in value.items()}", "value"
    ),
    "an index of the backward pass stays in host memory": Plant(
        check_training, "model.attention:SharedPrompts.to", "return SharedPrompts(rows, first, repeats,",
        "return SharedPrompts(rows, first, self.repeats,"
    ),
    "the gradient norm is summed in host memory": Plant(
        check_training, "train.fsdp:grad_norm", ", device=mesh.device_type", ""
    ),
    "the sample of each token is counted in host memory": Plant(
        check_training, "algo.tokens:Tokens.sample_index", ", device=self.lengths.device", ""
    ),
    "positions stay in host memory": Plant(
        check_rollout, "rollout.builtin.continuous_batch:ContinuousBatch._logits",
        "to_device(positions, self.device)", "positions"
    ),
    "the sampling noise stays in host memory": Plant(
        check_rollout, "rollout.sampling:gumbel_sample", ".copy()), logits.device)", ".copy()), torch.device('cpu'))"
    ),
    "the mask of decoding is made in host memory": Plant(
        check_rollout, "rollout.builtin.kv_cache:_mask", ", device=positions.device", ""
    ),
    "a token attends to the one after it": Plant(
        check_rollout, "rollout.builtin.kv_cache:_mask", "key > positions", "key > 1 + positions",
        "the device generates something else",
    ),
    "the keys of a later turn are written a place too early": Plant(
        check_rollout, "rollout.builtin.kv_cache:Extension.__call__", "keys[self.pages, :, self.offsets",
        "keys[self.pages, :, self.offsets - 1",
        "the device generates something else",
    ),
    "weights of the rollout are allocated in host memory": Plant(
        check_rollout, "rollout.builtin.weight_buffers:empty_weights", ", device=device) for", ") for",
        "Unsupported device in DLTensor",
    ),
    "the host waits for every token": Plant(
        check_rollout, "rollout.builtin.continuous_batch:ContinuousBatch._sample", ").tolist()",
        "); both = [[x.item() for x in row] for row in both]", "the host waits for the device more than once",
    ),
    "the optimiser's step count is restored in host memory": Plant(
        check_checkpoint, "train.trainer:Trainer._state_of", ", device=shard.device", ""
    ),
    "a checkpoint is copied on the device": Plant(
        check_checkpoint, "checkpoint.writer:_copy", '.to("cpu", copy=True)', ".clone()",
        "AssertionError",
    ),
    "weights are received in host memory": Plant(
        sync_weights, "weights.sync:WeightSync.run", "torch.uint8, device=lanes.device", "torch.uint8",
        "the weights went through host memory",
    ),
    "weights are sent from host memory": Plant(
        sync_weights, "comm.transport:Transport._send_buffer", "torch.uint8, device=device", "torch.uint8",
        "the weights went through host memory",
    ),
    "weights go through shared memory": Plant(
        sync_weights, "comm.transport:Transport.execute", 'request.out.device.type != "cpu"', "False",
        "convert rehearsal(:0)? device type tensor to numpy|lost rank",
    ),
    "weights are sent in a group that nobody has joined": Plant(
        sync_weights, "comm.transport:Transport._execute_on_device", "group, out = self.device_group",
        "group, out = dist.new_group([0, 1])",
        "the first operation of a process group has to be one of all its ranks",
    ),
    "a field stays on the device": Plant(
        check_exchange, "batch.batch:_materialized", ".cpu()", "", "convert rehearsal(:0)? device type tensor to numpy"
    ),
    "the thread that communicates has not said on which device": Plant(
        check_overlap, "comm.streams:own_stream", "module.set_device(device)", "pass",
        "'communication' uses a device and has not set it",
    ),
    "the thread that communicates is in the stream of the chain": Plant(
        check_overlap, "comm.streams:own_stream", "module.stream(module.Stream())", "module.stream(None)",
        "'communication' uses the main thread's stream",
    ),
    "weights are sent before they are computed": Plant(
        check_overlap, "run.mailbox:Mailbox.take", "moment.wait()", "pass", "RaceError: .*may still write"
    ),
    "a bucket is filled again while it is unpacked": Plant(
        check_overlap, "comm.streams:Lanes.await_last", "end.wait()", "pass", "RaceError: "
    ),
    "a bucket is unpacked before it is received": Plant(
        check_overlap, "comm.transport:Transport._execute_on_device", "work.wait()", "work.is_completed()",
        "AssertionError|RaceError",
    ),
    "a lane does not wait for the weights": Plant(
        check_overlap, "comm.streams:Lanes.use", "begun.wait()", "pass", "RaceError: .*may still write"
    ),
    "what a replay reads is not what it is given": Plant(
        check_graphs, "rollout.builtin.decoding_graphs:_Recorded._fill", "fill(self.rows, rows)",
        "self.rows = rows.to(self.rows.device)", "a replay generates something else",
    ),
    "what was recorded is not replayed": Plant(
        check_graphs, "rollout.builtin.decoding_graphs:_Recorded.__call__", "self.graph.replay()", "pass",
        "a replay generates something else",
    ),
    "what fills a step up writes to a page of another sequence": Plant(
        check_graphs, "rollout.builtin.decoding_graphs:DecodingGraphs.__call__",
        "= table[rows]",
        "= table[rows * (np.arange(shape[0]) < count)]",
        "a replay generates something else",
    ),
    "the host copies while a step is recorded": Plant(
        check_graphs, "rollout.builtin.device_cache:PagedAttention._use", "self.cache, count = cache, shape[0]",
        "self.cache, count, numbers = cache, shape[0], numbers.cpu().to(numbers.device)", "while a graph is recorded",
    ),
    "the host reads moments before they are there": Plant(
        check_offload, "train.offload:_wait", "torch.get_device_module(device).synchronize()", "pass",
        "the host reads something else",
    ),
}  # fmt: skip


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    module_name, _, name = plant.function.partition(":")
    module = import_module(f"distflow.{module_name}")
    function = plain_function(operator.attrgetter(name)(module))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(plant.code) != 1:
        raise LookupError(f"'{plant.code}' is not in {plant.function} once, as it was; update the plant")
    names: dict[str, Any] = {}
    exec(compile(source.replace(plant.code, plant.mistake), plant.function, "exec"), vars(module), names)
    original, function.__code__ = function.__code__, plain_function(names[name.rpartition(".")[2]]).__code__
    try:
        yield
    finally:
        function.__code__ = original


def plain_function(decorated: Any) -> Any:
    return inspect.unwrap(getattr(decorated, "func", decorated))


def plant_all(rank: int, workers: int) -> dict[str, str]:
    """Returns the error that each mistake ends in, after every check has passed without a mistake."""
    plants = {name: plant for name, plant in PLANTS.items() if plant.workers == workers}
    for check in dict.fromkeys(plant.check for plant in plants.values()):
        check(rank)
        races.check()
    return {name: error_of(plant, rank) for name, plant in plants.items()}


def error_of(plant: Plant, rank: int) -> str:
    try:
        with planted(plant):
            plant.check(rank)
        races.check()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    finally:
        races.forget()
    return "none"


def end_at_once(rank: int) -> None:
    os._exit(3)


def test_a_worker_that_ends_without_a_result_is_noticed_at_once() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] of 1 gave no answer: ended, exit code 3"):
        rehearse(1, end_at_once)


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    """Returns the errors of all ranks."""
    return [errors for workers in (1, 2) for errors in rehearse(workers, plant_all, workers)]


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(errors: list[dict[str, str]], name: str) -> None:
    told = [rank[name] for rank in errors if name in rank]
    assert any(re.search(PLANTS[name].error, error) for error in told), told
