"""Fixtures of the sandbox's tests. They skip, with the reason, what this machine cannot prevent."""

from collections.abc import Iterator

import pytest

from distflow.sandbox.sandbox import Sandbox
from distflow.sandbox.walls import MECHANISMS
from sandbox.jails import LIMITS, WITHOUT_NAMESPACES, missing_protection


@pytest.fixture(scope="module", params=[MECHANISMS, WITHOUT_NAMESPACES], ids=["all mechanisms", "without namespaces"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if reason := missing_protection(request.param):
        pytest.skip(reason)
    with Sandbox(LIMITS, mechanisms=request.param) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def plain() -> Iterator[Sandbox]:
    """A sandbox with all mechanisms this machine has, for tests that do not depend on them."""
    if reason := missing_protection(MECHANISMS):
        pytest.skip(reason)
    with Sandbox(LIMITS) as sandbox:
        yield sandbox
