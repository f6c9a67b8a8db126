"""The compute time of nodes, by a roofline: FLOPs / the device's FLOP/s, bytes / its memory bandwidth.

All functions work on the replicas of a layout at once; the sp × tp ranks of a replica work as one.
"""

import math
from dataclasses import dataclass

import numpy as np

from distflow.config.model_shape import Floats, ModelShape
from distflow.flow.graph import Node
from distflow.plan.layout import Layout
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware
from distflow.util.arrays import Ints, position_in_run


@dataclass(frozen=True)
class Work:
    """One node on one layout: the replica and the response length of every sample."""

    node: Node
    layout: Layout
    replica: Ints  # of each sample
    lengths: Floats
    hosts: Ints  # of each rank
    repeat: int  # samples per prompt
    slowness: Floats | float = 1.0  # of each replica: its slowest device's, beside a device of mean speed


@dataclass(frozen=True)
class Times:
    """The seconds of each replica: busy, and until it is done, including waits for other replicas."""

    busy: Floats
    elapsed: Floats


def compute_times(work: Work, hardware: Hardware, costs: Costs) -> Times:
    """Returns the times of a node: given, or by the roofline; 0 if nothing is known."""
    node, replicas = work.node, work.layout.dp
    model = costs.models.get(node.role)
    if node.id in costs.seconds:
        seconds = np.full(replicas, float(costs.seconds[node.id]))
    elif model is None or node.type == "compute":
        seconds = np.zeros(replicas)
    elif node.generates:
        seconds = _Decoding(work, hardware, costs, model).seconds() * work.slowness
    else:
        return _pass_times(work, hardware, costs, model)
    return Times(seconds, seconds)


def in_lockstep(work: Work, costs: Costs) -> bool:
    """Returns whether the replicas run in lockstep: they sum gradients or gather sharded parameters."""
    if work.node.id in costs.seconds or work.node.role not in costs.models or work.layout.dp == 1:
        return False
    return work.node.type == "train" or (not work.node.generates and shards_of(work.layout, costs) > 1)


def shards_of(layout: Layout, costs: Costs) -> int:
    ranks = layout.without_sp.dp
    return min(costs.shard or ranks, ranks)


def _pass_times(work: Work, hw: Hardware, costs: Costs, model: ModelShape) -> Times:
    """Returns the times of a forward pass, or forward and backward, in micro-batches that gather sharded parameters."""
    train = work.node.type == "train"
    parts, epochs = (int(work.node.params.get(k, 1)) if train else 1 for k in ("mini_batches", "epochs"))
    layout, replicas = work.layout, work.layout.dp
    passes = (4 if costs.gradient_checkpointing else 3) if train else 1
    sequence = costs.prompt_tokens + work.lengths
    seconds = passes * _forward_seconds(hw, model, sequence) / layout.replica_size
    seconds += passes * _all_reduce_seconds(work, hw, costs, model) * sequence / layout.sp
    exchanges = passes - 1 if train else 1  # a backward pass sends as much as a forward pass
    seconds += exchanges * _exchange_seconds(work, hw, costs, model) * sequence
    seconds = seconds * np.broadcast_to(work.slowness, (replicas,))[work.replica]
    part = _own_mini_batches(work, parts) if costs.own_mini_batches else _mini_batches(work, parts)
    per_pass = costs.micro_samples if train else costs.forward_samples
    gather = _gather_seconds(work, hw, costs, model, train)
    if per_pass is None:
        place = work.replica * parts + part
        compute = np.bincount(place, seconds, replicas * parts).reshape(replicas, parts)
        tokens = np.bincount(place, sequence, replicas * parts).reshape(replicas, parts)
        micro = np.maximum(np.ceil(tokens / (costs.micro_tokens * layout.sp)), 1).max(axis=0)  # the same on all ranks
        busy = np.maximum(compute, micro * gather)  # parameters are prefetched: the slower of the two is seen
    else:
        busy = np.maximum(_by_micro_batch(work, seconds, part, parts, per_pass), gather)
        if shards_of(layout, costs) == 1:  # no rank waits within a mini-batch
            busy = busy.reshape(replicas, parts, -1).sum(axis=2)
    # The replicas wait for the slowest after every column but the last, after which the caller decides.
    waiting = epochs * float(busy.max(axis=0).sum()) - float(busy[:, -1].max())
    return Times(epochs * busy.sum(axis=1), waiting + busy[:, -1])


def _forward_seconds(hw: Hardware, model: ModelShape, lengths: Floats) -> Floats:
    """Returns the seconds of one device for a forward pass on sequences: its products, and what is between them, in
    which it only reads and writes."""
    e = hw.efficiency
    moved = e.activation_bytes * model.layers * model.hidden + e.vocab_bytes * model.vocab
    attention = model.attention_flops(lengths) / (hw.device.flops * e.attention)
    return lengths * (_product_seconds(hw, model) + moved / hw.device.memory_rate) + attention


def _product_seconds(hw: Hardware, model: ModelShape) -> float:
    """Returns the seconds of the products of a token with the parameters, and of its way to its experts and back."""
    return 2 * model.active_params / (hw.device.flops * hw.efficiency.linear) + _dispatch_seconds(hw, model)


def _dispatch_seconds(hw: Hardware, model: ModelShape) -> float:
    """Returns the seconds in which the kernels of all layers bring a token to its experts and back."""
    if model.experts == 1:
        return 0.0
    return hw.efficiency.expert_bytes * model.layers * model.active * model.hidden / hw.device.memory_rate


def _by_micro_batch(work: Work, seconds: Floats, part: Ints, parts: int, size: int) -> Floats:
    """Returns the seconds of each micro-batch of `size` samples, [replicas, all micro-batches of all mini-batches].

    Such micro-batches differ in tokens, and ranks that gather sharded parameters wait for the slowest in each of them.
    """
    key = work.replica * parts + part
    micro = _position(key) // size
    count = int(micro.max(initial=0)) + 1
    times = np.bincount(key * count + micro, seconds, work.layout.dp * parts * count).astype(np.float64)
    return times.reshape(work.layout.dp, parts * count)


def _mini_batches(work: Work, parts: int) -> Ints:
    """Returns the mini-batch of each sample: the step's prompts, round-robin."""
    return np.arange(len(work.replica)) // work.repeat % parts


def _own_mini_batches(work: Work, parts: int) -> Ints:
    """Returns the mini-batch of each sample if every worker cuts its own samples into equal parts."""
    held = np.bincount(work.replica, minlength=work.layout.dp)
    return _position(work.replica) * parts // held[work.replica]


def _position(key: Ints) -> Ints:
    """Returns the place of each sample among those with the same key, in their order."""
    order = np.argsort(key, kind="stable")
    place = np.empty_like(key)
    place[order] = position_in_run(key[order])
    return place


def _all_reduce_seconds(work: Work, hw: Hardware, costs: Costs, model: ModelShape) -> float:
    """Seconds per token of a forward pass for tensor parallelism: two all-reduces of the hidden state per layer."""
    tp = work.layout.tp
    if tp == 1:
        return 0.0
    size = 2 * model.layers * model.hidden * costs.dtype_bytes * 2 * (tp - 1) / tp
    return size / _ring_rate(work, hw, work.layout.ranks[:tp])


def _exchange_seconds(work: Work, hw: Hardware, costs: Costs, model: ModelShape) -> float:
    """Seconds per token of a forward pass for sequence parallelism: queries, keys and values go from rows to heads in
    each layer, and what attention returns goes back. Each rank sends what it has of this, less its own part."""
    sp = work.layout.sp
    if sp == 1:
        return 0.0
    kv_heads = math.lcm(model.kv_heads, sp)  # of fewer than ranks there are several copies
    size = model.layers * 2 * (model.heads + kv_heads) * model.head_dim * costs.dtype_bytes / work.layout.tp
    return size / sp * (sp - 1) / sp / _ring_rate(work, hw, work.layout.replicas[0])


def _gather_seconds(work: Work, hw: Hardware, costs: Costs, model: ModelShape, train: bool) -> float:
    """Seconds of one micro-batch for gathering the parameters, twice when training, and for scattering gradients.

    One copy of the parameters enters a host, over all of its links. Each collective goes around a ring of all ranks.
    """
    shards = shards_of(work.layout, costs)
    if shards == 1 and not train:
        return 0.0
    size = model.params / work.layout.tp * (1 - 1 / shards)
    moved = size * (2 * costs.dtype_bytes + 4) if train else size * costs.dtype_bytes
    group = work.layout.ranks[: shards * work.layout.tp]
    local = moved / hw.local.rate
    hosts = len(np.unique(work.hosts[list(group)]))
    collectives = model.layers * (3 if train and shards > 1 else 1)
    steps = (hosts - 1, shards - hosts) if hosts > 1 else (0, shards - 1)  # of the ring: between hosts, within one
    ring = collectives * (steps[0] * hw.network.latency_s + max(steps[1], 0) * hw.local.latency_s)
    if hosts == 1:
        return local + ring
    per_host = max(1, min(len(group), hw.workers_per_host))
    tp_share = work.layout.tp if work.layout.tp <= per_host else per_host  # tp columns gather at the same time
    links = per_host if hw.network.per == "worker" else 1
    return ring + max(local, moved * tp_share / (hw.network.rate * hw.efficiency.network * links))


def _ring_rate(work: Work, hw: Hardware, ranks: tuple[int, ...]) -> float:
    if len(np.unique(work.hosts[list(ranks)])) == 1:
        return hw.local.rate
    return hw.network.rate * hw.efficiency.network


class _Decoding:
    """Generation with continuous batching: a decoding step reads the weights once, and all keys and values so far."""

    def __init__(self, work: Work, hw: Hardware, costs: Costs, model: ModelShape) -> None:
        self.work, self.hw, self.costs, self.model = work, hw, costs, model

    def seconds(self) -> Floats:
        work, costs, tp = self.work, self.costs, self.work.layout.tp
        replicas = work.layout.dp
        order = np.argsort(work.replica, kind="stable")
        held = np.bincount(work.replica, minlength=replicas)
        most = int(held.max(initial=0))
        if not most:
            return np.zeros(replicas)
        steps = np.zeros((replicas, most))  # [replicas, sequences]: tokens of each response; 0: none
        steps[work.replica[order], position_in_run(work.replica[order])] = np.maximum(work.lengths[order], 1)
        kv_bytes = self.model.kv_elements * costs.dtype_bytes / tp
        context = costs.prompt_tokens + float(work.lengths.mean())
        slots = max(1, min(costs.max_sequences, most, int(costs.kv_cache / (kv_bytes * max(context, 1)))))
        begin = _start_steps(steps, slots)
        prefill = costs.prompt_tokens * np.ceil(held / work.repeat)  # once for all responses to a prompt
        return self._decode(begin, begin + steps, kv_bytes) + prefill * _product_seconds(self.hw, self.model) / tp

    def _decode(self, begin: Floats, end: Floats, kv_bytes: float) -> Floats:
        """Sums the time of all decoding steps, over intervals in which the same sequences are running."""
        hw, tp = self.hw, self.work.layout.tp
        times = np.concatenate([begin, end], axis=1)
        change = np.concatenate([np.where(end > begin, 1.0, 0.0), np.where(end > begin, -1.0, 0.0)], axis=1)
        # Context tokens of a running sequence at time t are prompt + t − its begin.
        offset = np.concatenate([-begin, begin], axis=1) * np.abs(change)
        order = np.argsort(times, axis=1, kind="stable")
        times, change, offset = (np.take_along_axis(x, order, 1) for x in (times, change, offset))
        running, shift = np.cumsum(change, axis=1)[:, :-1], np.cumsum(offset, axis=1)[:, :-1]
        width = np.diff(times, axis=1)
        middle = (times[:, 1:] + times[:, :-1]) / 2
        context = running * (self.costs.prompt_tokens + middle) + shift
        model, experts = self.model, self.model.active_experts
        dense = model.active_params - experts
        rate, memory = hw.device.flops, hw.device.memory_rate * hw.efficiency.decode_memory
        read = dense * self.costs.dtype_bytes / tp + context * kv_bytes
        flops = running * 2 * dense / tp + context * 4 * model.layers * model.heads * model.head_dim / tp
        step = np.maximum(read / memory, flops / (rate * hw.efficiency.decode_flops))
        # Tables of kernels: few tokens for each expert take the time to read it and that to compute, not the larger.
        step += model.read_experts(running) * self.costs.dtype_bytes / tp / memory
        step += running * (2 * experts / (rate * hw.efficiency.linear) + _dispatch_seconds(hw, model)) / tp
        step += running * _all_reduce_seconds(self.work, hw, self.costs, self.model) + hw.efficiency.decode_step_s
        if tp > 1:
            step += 4 * self.model.layers * math.log2(tp) * hw.local.latency_s
        total: Floats = (np.where(running > 0, step, 0.0) * width).sum(axis=1)
        return total


def _start_steps(steps: Floats, slots: int) -> Floats:
    """Returns the decoding step at which each sequence starts: at once, or when a slot becomes free, in order."""
    begin = np.zeros_like(steps)
    free = steps[:, :slots].copy()
    rows = np.arange(len(steps))
    for i in range(slots, steps.shape[1]):
        slot = free.argmin(axis=1)
        begin[:, i] = free[rows, slot]
        free[rows, slot] += steps[:, i]
    return begin
