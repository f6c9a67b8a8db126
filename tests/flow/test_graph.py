import re
from typing import Any

import pytest

from distflow.errors import FlowError
from distflow.flow import Flow, Node


def diamond() -> Flow:
    """Declared back to front: the order must come from the fields."""
    return Flow(
        "diamond",
        ("prompt", "answer"),
        (
            Node("update", reads=("response", "advantage"), writes=(), type="train"),
            Node("advantage", reads=("score", "length"), writes=("advantage",)),
            Node("judge", reads=("response", "answer"), writes=("score",)),
            Node("measure", reads=("response",), writes=("length",)),
            Node("generate", reads=("prompt",), writes=("response",)),
        ),
    )


def ids(flow: Flow) -> list[str]:
    return [n.id for n in flow.order]


def test_fan_out_fan_in_and_diamond() -> None:
    f = diamond()
    assert f.writer == {
        "prompt": "data",
        "answer": "data",
        "response": "generate",
        "score": "judge",
        "length": "measure",
        "advantage": "advantage",
    }
    assert f.readers["response"] == ("update", "judge", "measure")  # fan-out, in declaration order
    assert f.readers["prompt"] == ("generate",)
    assert f.parents(f.node("advantage")) == ("judge", "measure")  # fan-in
    assert f.parents(f.node("update")) == ("generate", "advantage")
    assert f.parents(f.node("generate")) == ()  # the loader aside


def test_a_field_nobody_reads_has_no_readers() -> None:
    assert Flow("f", ("a",), (Node("n", writes=("b",)),)).readers == {"a": (), "b": ()}


def test_order_is_depth_then_declaration() -> None:
    f = diamond()
    assert f.depth == {"generate": 0, "judge": 1, "measure": 1, "advantage": 2, "update": 3}
    assert ids(f) == ["generate", "judge", "measure", "advantage", "update"]
    swapped = Flow(f.name, f.source, (f.nodes[3], f.nodes[2], *f.nodes[:2], f.nodes[4]))
    assert ids(swapped) == ["generate", "measure", "judge", "advantage", "update"]


def test_depth_is_the_longest_path_from_a_root() -> None:
    nodes = (
        Node("a", writes=("a",)),
        Node("late", reads=("a", "c"), writes=()),
        Node("b", reads=("a",), writes=("b",)),
        Node("c", reads=("b",), writes=("c",)),
    )
    assert Flow("f", (), nodes).depth == {"a": 0, "b": 1, "c": 2, "late": 3}


def test_after_orders_without_data() -> None:
    f = Flow("f", (), (Node("second", after=("first", "data")), Node("first")))
    assert ids(f) == ["first", "second"]
    assert f.parents(f.node("second")) == ("first",)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"id": "data"}, "node 'data': this id is taken by the loader; choose another"),
        ({"id": "2nd"}, "node '2nd': '2nd' is not a name; use letters"),
        ({"id": ""}, "node '': '' is not a name"),
        ({"id": "n\n"}, "is not a name"),
        ({"id": "n", "writes": ("a b",)}, "node 'n': 'a b' is not a name"),
        ({"id": "n", "type": "tarin"}, "node 'n': unknown type 'tarin'; did you mean 'train'?"),
        ({"id": "n", "type": "x"}, "node 'n': unknown type 'x'; known: compute, inference, train"),
        ({"id": "n", "reads": ("a", "b", "a")}, "node 'n': reads 'a' twice; name it once"),
        ({"id": "n", "writes": ("a", "b", "b")}, "node 'n': writes 'b' twice; name it once"),
        (
            {"id": "n", "reads": ("tokens", "x"), "balance": "token"},
            "node 'n': balance names field 'token', which the node does not read; did you mean 'tokens'?",
        ),
    ],
)
def test_a_wrong_node_is_refused_by_name(node: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=re.escape(message)):
        Node(**node)


@pytest.mark.parametrize("name", ["a", "judge.score", "_x", "größe", "x2"])
def test_good_names(name: str) -> None:
    assert Node(name, writes=(name,)).id == name


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Node("n", reads=("respnse",)), Node("g", writes=("response",))], "did you mean 'response'?"),
        ([Node("n", reads=("promt",))], "node 'n': reads unknown field 'promt'; did you mean 'prompt'?"),
        ([Node("n", reads=("zzz",))], "node 'n': reads unknown field 'zzz'; known: prompt"),
        (
            [Node("n", writes=("x",)), Node("m", writes=("x",))],
            "node 'm': field 'x' has two writers, 'n' and 'm'; give one of them another name",
        ),
        ([Node("n", writes=("prompt",))], "node 'n': field 'prompt' has two writers, 'data' and 'n'"),
        ([], "flow 'f' has no nodes"),
        ([Node("n"), Node("m"), Node("n")], "flow 'f': two nodes have the id 'n'"),
        ([Node("n", after=("mm",)), Node("mmm")], "node 'n': depends on unknown node 'mm'; did you mean 'mmm'?"),
    ],
)
def test_a_wrong_graph_is_refused_by_node_and_field(nodes: list[Node], message: str) -> None:
    with pytest.raises(FlowError, match=re.escape(message)):
        Flow("f", ("prompt",), tuple(nodes))


@pytest.mark.parametrize(
    ("nodes", "path", "steps"),
    [
        ([Node("a", reads=("a",), writes=("a",))], "a → a", ["'a' reads 'a' of 'a'"]),
        ([Node("a", after=("a",))], "a → a", ["'a' comes after 'a'"]),
        (
            [
                Node("a", reads=("z",), writes=("x",)),
                Node("b", reads=("x",), writes=("y",)),
                Node("c", reads=("y",), writes=("z",)),
                Node("tail", reads=("z",)),  # hangs on the cycle without being part of it
            ],
            "a → b → c → a",
            ["'b' reads 'x' of 'a'", "'c' reads 'y' of 'b'", "'a' reads 'z' of 'c'"],
        ),
        (
            [Node("a", after=("b",), writes=("x",)), Node("b", reads=("x",))],
            "a → b → a",
            ["'b' reads 'x' of 'a'", "'a' comes after 'b'"],
        ),
    ],
)
def test_a_cycle_is_reported_as_a_path(nodes: list[Node], path: str, steps: list[str]) -> None:
    root = Node("root", writes=("root",))
    with pytest.raises(FlowError) as e:
        Flow("f", (), (root, *nodes))
    message = str(e.value)
    assert f"flow 'f': cycle {path}: " in message
    assert all(s in message for s in steps)
    assert "tail" not in message
    assert "root" not in message
