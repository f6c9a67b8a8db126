"""Reports which protections of the sandbox work on this machine: `python -m distflow.sandbox`."""

import time
from collections.abc import Iterator

from distflow.sandbox.sandbox import Sandbox
from distflow.sandbox.walls import REQUIRED, explain, explain_missing


def report() -> Iterator[str]:
    """Yields a line for each protection, and one for the time a program takes to start and end."""
    with Sandbox(accept_missing=list(REQUIRED)) as sandbox:
        for name in REQUIRED:
            missing = explain_missing(name, sandbox.refusals)
            yield f"{name:10} {sandbox.protections.get(name) or f'NO: {missing}'}"
        for name in ("disk", "threads"):
            yield f"{name:10} {sandbox.protections[name]}"
        if sandbox.refusals["namespaces"]:
            yield f"{'note':10} {explain('namespaces', sandbox.refusals['namespaces'])}"
        start = time.perf_counter()
        for _ in range(20):
            sandbox.run("")
        yield f"{'overhead':10} {(time.perf_counter() - start) * 50:.1f} ms per program"


if __name__ == "__main__":
    print(*report(), sep="\n")
