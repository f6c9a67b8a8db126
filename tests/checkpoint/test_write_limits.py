"""A large checkpoint has the time that it takes to be written, beyond the limits of the config."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from distflow.checkpoint.writer import write_s
from distflow.cluster.local import _write_s
from distflow.liveness.heartbeat import Heartbeat


def test_it_is_a_second_for_so_many_bytes() -> None:
    part: Any = SimpleNamespace(tensors={"a": torch.empty(100 << 20, dtype=torch.int8, device="meta")})
    assert write_s({"actor": part, "critic": part}) == 4.0


def test_a_launcher_waits_as_long_as_the_largest_part_takes(tmp_path: Path) -> None:
    for rank, seconds in enumerate((3.0, 70.0)):
        heartbeat = Heartbeat(rank, tmp_path)
        heartbeat.write_s = seconds
        heartbeat.beat()
    assert _write_s(tmp_path, 2) == 70.0
