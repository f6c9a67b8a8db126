"""Nodes that fail in the first attempts of a run."""

import json
import os
import signal
import time

from distflow import node


@node(writes="a")
def work(batch, ctx, how="well", rank=1, step=2, times=1, keep=0, nap_s=0.02, slow=-1):
    """Fails on `rank` in `step` of so many attempts. `keep`: the step of which there seems to be a checkpoint."""
    tries = ctx.folder / f"tries.{ctx.rank}"
    if ctx.step == 0:
        with open(tries, "a") as f:
            f.write(os.environ.get("DISTFLOW_RESUME", "-"))
    if ctx.rank == 0 and ctx.step == keep > 0:
        (ctx.folder / "checkpoints").mkdir(exist_ok=True)
        (ctx.folder / "checkpoints" / "latest").write_text(json.dumps({"step": keep}))
    time.sleep(nap_s * (5 if ctx.rank == slow else 1))
    if (ctx.rank, ctx.step) == (rank, step) and len(tries.read_text()) <= times:
        match how:
            case "raise":
                raise ValueError("no luck")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return [1.0] * len(batch)


@node(writes=())
def use(batch, ctx):
    ctx.metrics.log("use/samples", len(batch), reduce="sum")
