"""The rehearsal's device finds what streams do in no order; each mistake here is one that a device may not show."""

from collections.abc import Callable

import pytest
import torch

from accelerator import races
from accelerator.rehearsal_device import NAME
from accelerator.rehearse import REHEARSED, rehearse
from distflow.comm.streams import Lanes, Moment, finish, own_stream
from distflow.util.copies import to_device, to_host

pytestmark = pytest.mark.skipif(not REHEARSED, reason="tests the rehearsal itself")


def device() -> torch.device:
    return torch.device(NAME, 0)


def no_event() -> None:
    x = torch.ones(8, device=device())
    with own_stream(device()):
        x.add_(1)


def events() -> None:
    x = torch.ones(8, device=device())
    made = Moment(device())
    with own_stream(device()):
        made.wait()
        x.add_(1)
        finish(device())
    x.add_(1)


def other_parts() -> None:
    x = torch.ones(8, device=device())
    made = Moment(device())
    with own_stream(device()):
        made.wait()
        x[:4].add_(1)
        x[4:6].add_(1)
        after = Moment(device())
    x[6:].add_(1)
    after.wait()
    x[2:].add_(1)


def the_same_part() -> None:
    x = torch.ones(8, device=device())
    made = Moment(device())
    with own_stream(device()):
        made.wait()
        x[:4].add_(1)
    x[3:].add_(1)


def both_read() -> None:
    x = torch.ones(8, device=device())
    made = Moment(device())
    with own_stream(device()):
        made.wait()
        x.sum()
        read = Moment(device())
    x.sum()
    read.wait()


def freed_too_early() -> None:
    x = torch.ones(8, device=device())
    made = Moment(device())
    with own_stream(device()):
        made.wait()
        x.sum()
    del x
    torch.ones(8, device=device())


def freed_and_left_alone() -> None:
    x = torch.ones(8, device=device())
    made = Moment(device())
    with own_stream(device()):
        made.wait()
        x.sum()
        after = Moment(device())
    del x
    after.wait()
    torch.ones(8, device=device())


def lanes_in_turn() -> None:
    lanes, memory = Lanes(device()), torch.ones(8, device=device())
    for lane in (0, 0):
        with lanes.use(lane):
            memory.add_(1)
    lanes.await_last(0)
    memory.add_(1)


def lanes_at_once() -> None:
    lanes, memory = Lanes(device()), torch.ones(8, device=device())
    for lane in (0, 1):
        with lanes.use(lane):
            memory.add_(1)


def changed_while_copied() -> None:
    host = races.empty_pinned(torch.ones(8)).fill_(1)
    host.to(device(), non_blocking=True)
    host.fill_(2)
    torch.get_device_module(device()).synchronize()


def changed_behind_a_copy_of_it() -> None:
    host = torch.ones(8)
    x = to_device(host, device())
    host.fill_(2)
    assert float(x.sum()) == 8


def read_too_early() -> None:
    host = to_host(torch.ones(8, device=device()))
    assert host.isnan().all(), "the device was waited for"
    finish(device())
    assert float(host.sum()) == 8


RIGHT = (
    events,
    freed_and_left_alone,
    other_parts,
    both_read,
    lanes_in_turn,
    changed_behind_a_copy_of_it,
    read_too_early,
)
WRONG = {
    no_event: "may still write",
    the_same_part: "may still write",
    freed_too_early: "of memory that was freed, in",
    lanes_at_once: "may still write",
    changed_while_copied: "was changed before its copy",
}


def try_all(rank: int) -> dict[str, str]:
    """Returns what was found of each."""
    found = {}
    for case in (*RIGHT, *WRONG):
        try:
            case()
            races.check()
            found[case.__name__] = ""
        except races.RaceError as e:
            found[case.__name__] = str(e)
        races.forget()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return dict(rehearse(1, try_all)[0])


@pytest.mark.parametrize("case", RIGHT, ids=lambda f: f.__name__)
def test_what_is_in_order_is_no_race(found: dict[str, str], case: Callable[[], None]) -> None:
    assert found[case.__name__] == ""


@pytest.mark.parametrize("case", WRONG, ids=lambda f: f.__name__)
def test_what_is_in_no_order_is_a_race(found: dict[str, str], case: Callable[[], None]) -> None:
    assert WRONG[case] in found[case.__name__]
