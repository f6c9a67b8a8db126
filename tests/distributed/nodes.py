"""Nodes that misbehave on one rank, in one step, in a way the config chooses."""

import os
import signal
import time

from distflow import node


@node(writes=["a", "b"])
def work(batch, ctx):
    return {"a": [float(i) for i in batch.ids], "b": ["text"] * len(batch)}


@node(writes="c")
def judge(batch, ctx, how="well", rank=1, step=1):
    time.sleep(0.02)
    if (ctx.rank, ctx.step) == (rank, step):
        match how:
            case "raise":
                raise ValueError("the judge is confused")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(10_000)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(7)
            case "short":
                return batch["a"][:-1]
            case "tuple":
                return [(1, 2)] * len(batch)
            case "silent":
                return None
    return batch["a"]


@node(writes=())
def use(batch, ctx):
    assert batch["c"].tolist() == [float(i) for i in batch.ids]
    ctx.metrics.log("use/samples", len(batch), reduce="sum")


class Counter:
    """A role with a state of its own, on the workers that have a node of it."""

    def __init__(self, start):
        self.count = start

    @node(writes=())
    def count(self, batch, ctx):
        self.count_up(len(batch))
        ctx.metrics.log("counter/value", self.count, reduce="max")

    def count_up(self, by):
        self.count += by
