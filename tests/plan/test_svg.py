import re
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.flow import Flow, Node
from distflow.flow.graph import NODE_TYPES
from distflow.plan import Place, Placement, Plan, Workload, plan
from distflow.plan.svg import svg
from distflow.util.text import human_bytes

SVG = "{http://www.w3.org/2000/svg}"
RANK_SETS = {"a": "0-3", "b": "4-7", "c": "0-1", "d": "2,3,6"}
PLACES = [Place(), Place("a"), Place("a", tp=2), Place("b"), Place("b", tp=4), Place("c"), Place("d", tp=3)]


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: "Box") -> bool:
        slack = 0.2  # coordinates are rounded to 0.1
        return (
            self.x + self.width > other.x + slack
            and other.x + other.width > self.x + slack
            and self.y + self.height > other.y + slack
            and other.y + other.height > self.y + slack
        )


def read(p: Plan) -> tuple[ElementTree.Element, dict[tuple[str, str], Box], list[Box]]:
    """Returns the drawing, its boxes and pills by kind and first word, and its lanes."""
    root = ElementTree.fromstring(svg(p))
    shapes = {}
    for g in root.iter(f"{SVG}g"):
        rect, name = g.find(f"{SVG}rect"), g.find(f"{SVG}text")
        assert rect is not None
        assert name is not None
        assert name.text
        shapes[g.attrib["class"], name.text.split()[0]] = box(rect)
    return root, shapes, [box(r) for r in root.iter(f"{SVG}rect") if r.get("class") == "lane"]


def box(rect: ElementTree.Element) -> Box:
    return Box(*(float(rect.attrib[k]) for k in ("x", "y", "width", "height")))


def texts(root: ElementTree.Element) -> str:
    return "\n".join(t.text or "" for t in root.iter(f"{SVG}text"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to 15 nodes, each reading fields of earlier ones, anywhere on overlapping and disjoint rank sets."""
    nodes: list[Node] = []
    for i in range(draw(st.integers(1, 15))):
        known = ["x", "y", *(n.writes[0] for n in nodes)]
        reads = tuple(draw(st.lists(st.sampled_from(known), max_size=4, unique=True)))
        after = tuple(draw(st.lists(st.sampled_from([n.id for n in nodes]), max_size=1))) if nodes else ()
        balance = draw(st.sampled_from([None, *reads]))
        kind = draw(st.sampled_from(NODE_TYPES))
        options = draw(st.booleans()), balance, draw(st.booleans())
        nodes.append(Node(f"n{i}", f"r{i % 3}", kind, reads, (f"f{i}",), "", after, {}, *options))
    where = {n.id: draw(st.sampled_from(PLACES)) for n in nodes}
    return plan(Flow("random", ("x", "y"), tuple(nodes)), Placement(8, rank_sets=RANK_SETS, nodes=where), Workload(24))


@settings(max_examples=60, deadline=None)
@given(plans())
def test_nothing_overlaps_and_nothing_is_missing(p: Plan) -> None:
    root, shapes, lanes = read(p)
    assert {name for kind, name in shapes if kind == "node"} == set(p.home)
    assert {name for kind, name in shapes if kind == "move"} == {m.id for m in p.moves}
    for (one, a), (two, b) in combinations(shapes.items(), 2):
        assert not a.overlaps(b), f"{one} lies on {two}"
    for a, b in combinations(lanes, 2):
        assert not a.overlaps(b)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for b in (*shapes.values(), *lanes):
        assert b.x >= 0
        assert b.y >= 0
        assert b.x + b.width <= width
        assert b.y + b.height <= height
    ranks = list(dict.fromkeys(frozenset(p.partition_of(i).layout.ranks) for i in p.home))
    for (kind, name), b in shapes.items():
        around = [r for r, lane in zip(ranks, lanes, strict=True) if lane.overlaps(b)]
        assert len(around) <= 1
        assert kind in ("move", "weights") or around == [frozenset(p.partition_of(name).layout.ranks)]


@settings(max_examples=60, deadline=None)
@given(plans())
def test_data_is_leftmost_and_lines_run_to_the_right(p: Plan) -> None:
    _, shapes, _ = read(p)
    assert all(shapes["node", "data"].x < b.x for key, b in shapes.items() if key != ("node", "data"))
    for e in p.edges:
        assert shapes["node", e.writer].x < shapes["node", e.reader].x


@settings(max_examples=60, deadline=None)
@given(plans())
def test_lines_pass_beside_boxes(p: Plan) -> None:
    root, shapes, _ = read(p)
    lines = [x.attrib["d"] for x in root.iter(f"{SVG}path") if x.get("class")]
    assert len(lines) >= len(p.edges)
    for d in lines:
        x0, y0, x1, bend, x2 = re.fullmatch(r"M(.+),(.+)H(.+)C(.+)H(.+)", d).groups()  # type: ignore[union-attr]
        x, y = bend.split()[-1].split(",")
        for a, b, level in ((x0, x1, y0), (x, x2, y)):
            straight = Box(float(a), float(level), float(b) - float(a), 0)
            assert not any(straight.overlaps(shape) for shape in shapes.values())
        assert float(x1) < float(x)  # bends lie between columns, where there is no box


def test_a_weight_sync_of_weights_is_drawn_before_the_node_that_generates_with_them() -> None:
    flow = Flow(
        "f",
        ("prompt",),
        (
            Node("generate", "actor", reads=("prompt",), writes=("response",), generates=True, method=True),
            Node("update", "actor", "train", reads=("response",), method=True),
        ),
    )
    places = {"generate": Place("rollout", tp=2), "update": Place("train")}
    placement = Placement(4, rank_sets={"rollout": "0-1", "train": "2-3"}, nodes=places)
    root, shapes, _ = read(plan(flow, placement, Workload(8, weights={"actor": 1 << 20})))
    assert "actor weights · 1.0 MiB" in texts(root)
    assert "dp2 → dp1·tp2" in texts(root)
    assert shapes["node", "data"].x < shapes["weights", "actor"].x < shapes["node", "generate"].x
    assert "actor weights · model not known here" in texts(read(plan(flow, placement, Workload(8)))[0])


def test_moves_show_fields_and_bytes_and_lanes_show_rank_sets() -> None:
    flow = Flow(
        "f",
        ("prompt",),
        (Node("generate", reads=("prompt",), writes=("response",)), Node("update", reads=("response",))),
    )
    places = {"generate": Place("rollout", tp=2), "update": Place("train")}
    p = plan(
        flow,
        Placement(4, rank_sets={"rollout": "0-1", "train": "2-3", "idle": "1-2"}, nodes=places),
        Workload(8, 1, {"response": 4096}),
    )
    root, shapes, lanes = read(p)
    (m,) = p.moves
    shown = texts(root)
    for t in (
        f"m0 · {human_bytes(m.expected_bytes)}",
        "response",
        "rollout",
        "ranks 0-1",
        "train",
        "ranks 2-3",
        "idle",
        "all 0-3",
    ):
        assert t in shown
    assert len(lanes) == 2
    assert lanes[0].y + lanes[0].height <= shapes["move", "m0"].y  # between the lanes
    assert shapes["move", "m0"].y + shapes["move", "m0"].height <= lanes[1].y


def test_parallel_nodes_stand_in_one_column() -> None:
    nodes = (
        Node("start", reads=("x",), writes=("a",)),
        Node("left", reads=("a",), writes=("b",)),
        Node("right", reads=("a",), writes=("c",)),
        Node("join", reads=("b", "c")),
    )
    placement = Placement(4, rank_sets={"g": "0-1", "h": "2-3"}, default=Place("g"), nodes={"left": Place("h")})
    _, shapes, _ = read(plan(Flow("diamond", ("x",), nodes), placement, Workload(4)))
    middle = [shapes["node", n].x + shapes["node", n].width / 2 for n in ("left", "right")]
    assert abs(middle[0] - middle[1]) < 0.2


def test_names_are_escaped() -> None:
    source = ('<prompt> & "quoted"', "bell\x07")
    nodes = (Node("n", "<role>&", reads=source),)
    placement = Placement(2, rank_sets={"<g&>": "0", "h": "1"}, default=Place("<g&>"), nodes={"data": Place("h")})
    root, _, _ = read(plan(Flow("<f> & co", source, nodes), placement, Workload(2)))
    shown = " ".join(texts(root).split())
    for t in ("<f> & co", "<role>&", "<g&>", *source[:1]):
        assert t in shown
    assert "\x07" not in shown


def test_a_node_may_have_the_name_of_a_move() -> None:
    flow = Flow("f", ("x",), (Node("m0", reads=("x",), writes=("y",)), Node("m1", reads=("y",))))
    placement = Placement(2, rank_sets={"a": "0", "b": "1"}, nodes={"m0": Place("a"), "m1": Place("b")})
    p = plan(flow, placement, Workload(2))
    _, shapes, _ = read(p)
    assert set(shapes) == {("node", "data"), ("node", "m0"), ("node", "m1"), ("move", "m0")}


def test_a_thousand_scattered_workers_fit() -> None:
    even = ",".join(str(r) for r in range(0, 1024, 2))
    p = plan(
        Flow("f", ("x",), (Node("n", reads=("x",)),)),
        Placement(1024, rank_sets={"even": even}, default=Place("even")),
        Workload(512),
    )
    root, _, _ = read(p)
    assert "ranks 0,2,4,…,1022 (512)" in texts(root)
    assert float(root.attrib["width"]) < 1000
