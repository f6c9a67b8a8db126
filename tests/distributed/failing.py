"""Nodes that fail in the first attempts of a run."""

import json
import os
import shutil
import signal
import sys
import time

from distflow import node

attempts: list[str] = []  # one character per attempt: r if it resumes, else -; read once in a process


@node(writes="a")
def work(batch, ctx, how="well", rank=1, step=2, times=1, nap_s=0.02, slow=-1):
    """Fails on `rank` in `step`, in so many attempts."""
    if not attempts:
        with open(ctx.folder / f"attempts.{ctx.rank}", "a+") as f:
            f.write("r" if any(word.startswith("--resume") for word in sys.argv) else "-")
            f.seek(0)
            attempts.extend(f.read())
    time.sleep(nap_s * (5 if ctx.rank == slow else 1))
    if ctx.step == step and how == "kill alone" and ctx.rank != rank and len(attempts) <= times:
        time.sleep(3600)  # waits for nobody
    if (ctx.rank, ctx.step) == (rank, step) and len(attempts) <= times:
        match how:
            case "raise":
                raise ValueError("no luck")
            case "kill" | "kill alone":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "steal":  # as a run on another host does that has not seen this one for a while
                (old,) = ctx.folder.glob(".owner.*")
                other = json.loads(old.read_text()) | {"nonce": "x", "host": "elsewhere", "pid": 7, "released": False}
                old.with_name(".owner.99").write_text(json.dumps(other))
                old.unlink()
            case "empty":
                shutil.rmtree(ctx.folder)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return [1.0] * len(batch)


@node(writes=())
def use(batch, ctx):
    ctx.metrics.log("use/samples", len(batch), reduce="sum")
