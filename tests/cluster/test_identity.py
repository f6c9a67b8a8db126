"""What workers tell each other at the start, and which differences end a run."""

import re
from dataclasses import replace

import pytest

from distflow.cluster.identity import SIZE, Identity, check_identities, describe_hosts, tensor_parallel_hint
from distflow.errors import DistflowError
from distflow.plan import Layout

CPU = Identity("id-a", "a", "10.0.0.1", 7, 1, "1.0", "2.13", "c0", "p0", "s0", "cpu", 0, "")


LONGEST = Identity(
    "i" * 80, "h" * 64, "f" * 45, 1 << 22, 1 << 32, "v" * 24, "v" * 24, *("h" * 12,) * 3, "d" * 12, 16, "u" * 48
)


def on(host: str, **changes: object) -> Identity:
    address = f"10.0.0.{ord(host[-1]) - 96}"
    return replace(CPU, host=host, host_id=f"id-{host}", address=address, **changes)  # type: ignore[arg-type]


def gpu(host: str, index: int) -> Identity:
    return on(host, device="cuda", device_count=2, device_id=f"GPU-{host}-{index}")


def test_an_identity_survives_packing() -> None:
    for identity in (CPU, gpu("é" * 8, 1), LONGEST):
        assert len(identity.pack()) == SIZE
        assert Identity.unpack(identity.pack()) == identity


def test_workers_that_run_the_same_are_fine() -> None:
    check_identities([CPU])
    check_identities([gpu("a", 0), gpu("a", 1), gpu("b", 0), gpu("b", 1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"distflow_version": "0.9"},
            "run different versions of DistFlow: ranks 0-1 (on a) have 1.0, ranks 2 (on b) have 0.9; inst",
        ),
        (
            {"torch_version": "2.12"},
            "run different versions of PyTorch: ranks 0-1 (on a) have 2.13, ranks 2 (on b) have 2.12",
        ),
        (
            {"code": "s1"},
            "run different code of DistFlow or of the config's own files: ranks 0-1 (on a) have s0, ranks 2 (on b)",
        ),
        (
            {"config": "c1"},
            "have different configs: ranks 0-1 (on a) have c0, ranks 2 (on b) have c1; copy the same file",
        ),
        (
            {"plan": "p1"},
            "derived different plans: ranks 0-1 (on a) have p0, ranks 2 (on b) have p1; their data files differ",
        ),
        (
            {"device": "cuda", "device_count": 1, "device_id": "x"},
            "have different devices: ranks 0-1 (on a) have cpu, ranks 2 (on b) have cuda; see why a host has none",
        ),
    ],
)
def test_a_difference_is_named_with_hosts_and_values(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DistflowError, match=re.escape(f"the workers {message}")):
        check_identities([on("a"), on("a"), on("b", **changes)])


def test_two_ranks_do_not_share_a_device() -> None:
    with pytest.raises(
        DistflowError, match="ranks 1 and 2 use the same cuda device of b, which shows 2: start at most"
    ):
        check_identities([gpu("a", 0), gpu("b", 0), gpu("b", 0)])


def test_a_message_stays_short_if_all_differ() -> None:
    with pytest.raises(DistflowError) as e:
        check_identities([on("a", config=str(i)) for i in range(1024)])
    assert len(str(e.value)) < 1000


def test_hosts_are_listed_with_their_addresses_and_ranks() -> None:
    workers = [on("a"), on("a"), on("b"), on("a")]
    assert describe_hosts(workers) == "4 workers on 2 hosts: a (10.0.0.1): ranks 0-1,3; b (10.0.0.2): rank 2"
    assert describe_hosts([CPU]) == "1 worker on 1 host: a (10.0.0.1): rank 0"
    many = describe_hosts([on(f"host{i // 8}a") for i in range(8192)])
    assert many.startswith("8192 workers on 1024 hosts: host0a (10.0.0.1): ranks 0-7; ")
    assert many.endswith("; … 1015 more …; host1023a (10.0.0.1): ranks 8184-8191")
    assert len(many) < 600


def test_tensor_parallelism_across_hosts_is_worth_a_warning() -> None:
    workers = [on("a"), on("a"), on("b"), on("b")]
    assert tensor_parallel_hint([Layout((0, 1, 2, 3), 2, 2), Layout((0, 1, 2, 3), 4)], workers) is None
    hint = tensor_parallel_hint([Layout((0, 2, 1, 3), 2, 2)], workers)
    assert hint is not None
    assert hint.startswith("tp 2: ranks 0,2 are on 2 hosts (a, b) and talk in every layer; choose a tp that divides")
