import io

import pytest
from rich.console import Console

from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Plan, Workload, plan
from distflow.plan.layout import ranks_text
from distflow.plan.table import headline, origins, render
from distflow.util.text import human_bytes


def diamond(workers: int = 4, source: tuple[str, ...] = ("prompt", "answer"), name: str = "diamond") -> Plan:
    nodes = (
        Node("generate", "actor", "inference", source[:1], ("response", "length")),
        Node("penalty", reads=("response", "length"), writes=("penalty",)),
        Node("judge", "reward", reads=(source[1], "response"), writes=("score",)),
        Node("advantage", reads=("score", "penalty"), writes=("advantage",), whole_groups=True),
        Node("update", "actor", "train", ("response", "advantage"), balance="response", after=("judge",)),
    )
    rollout = Place("rollout", tp=2)
    placement = Placement(
        workers,
        rank_sets={"rollout": "0%-50%", "train": "50%-"},
        default=Place("train"),
        nodes={"generate": rollout, "judge": rollout},
    )
    return plan(Flow(name, source, nodes), placement, Workload(1024, 4, {"response": 4096}))


def test_the_weight_sync_of_weights_is_listed_with_its_layouts_and_bytes() -> None:
    nodes = (
        Node("generate", "actor", "inference", ("prompt",), ("response",), generates=True, method=True),
        Node("update", "actor", "train", ("response",), method=True),
    )
    placement = Placement(4, {"rollout": "0-1", "train": "2-3"}, Place("train"), {}, {"generate": Place("rollout")})
    shown = text(plan(Flow("f", ("prompt",), nodes), placement, Workload(8, weights={"actor": 3 << 20})))
    (row,) = (line for line in section(shown, "Weights, synced") if line.startswith("actor"))
    assert row.split() == ["actor", "train", "2-3", "dp2", "rollout", "0-1", "dp2", "6.0", "MiB"]
    assert "Weights, synced" not in text(diamond())


def text(p: Plan, width: int = 110) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(p))
    return out.getvalue()


def section(shown: str, title: str) -> list[str]:
    return shown[shown.index(title) :].split("\n\n")[0].splitlines()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_node_move_and_rank_set_is_shown(width: int) -> None:
    p = diamond()
    shown = text(p, width)
    nodes = {line.split()[0] for line in section(shown, "Nodes") if line.strip()}
    moves = {line.split()[0] for line in section(shown, "Moves") if line.strip()}
    assert nodes >= {"data", *(n.id for n in p.flow.nodes)}
    assert moves >= {m.id for m in p.moves}
    for m in p.moves:
        assert human_bytes(m.expected_bytes) in shown
    for t in ("rank sets: all 0-3", "rollout 0-1", "train 2-3", p.hash[:8], "4096 samples per step", "4 per prompt"):
        assert t in shown
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown


def test_a_long_name_is_folded_not_cut() -> None:
    name = "q" * 200
    p = plan(Flow("f", (name,), (Node("n", reads=(name,)),)), Placement(1), Workload(1))
    assert text(p, 80).count("q") == 3 * len(name)  # written by data, read by n, freed


def test_inputs_show_where_they_come_from() -> None:
    rows = {line.split()[0]: line for line in section(text(diamond(), 140), "Nodes") if line.strip()}
    assert "local: prompt" in rows["generate"]
    assert "m0: response, length" in rows["penalty"]
    assert "local: answer, response" in rows["judge"]


def test_origins_follow_a_field_through_two_moves() -> None:
    p = diamond()
    m0, _, m2 = p.moves
    sources = origins(p)
    assert sources[m0] == {"response": "generate", "length": "generate"}
    assert sources[m2] == {"response": m0, "advantage": "advantage"}
    assert sources["update"] == {"response": m2, "advantage": m2}


def test_chains_are_in_the_order_of_the_plan() -> None:
    lines = " ".join(" ".join(line.split()) for line in section(text(diamond(), 200), "Chains"))
    assert "rollout 0-1 load → generate → free prompt → ⇢m0 → free length → judge" in lines
    assert "train 2-3 ⇠m0 → penalty" in lines
    assert "⇄m2" in lines


def test_a_rank_without_tasks_is_shown() -> None:
    flow = Flow("f", ("a",), (Node("n", reads=("a",)),))
    p = plan(flow, Placement(4, rank_sets={"g": "0-1"}, default=Place("g")), Workload(4))
    assert "2-3" in text(p)
    assert "no node is placed here" in text(p)


def test_a_thousand_workers_stay_readable() -> None:
    shown = text(diamond(1024), 100)
    assert "rollout 0-511" in shown
    assert "train 512-1023" in shown
    assert len(shown.splitlines()) < 80


def test_scattered_ranks_stay_short() -> None:
    assert ranks_text(tuple(range(0, 1024, 2))) == "0,2,4,…,1022 (512)"
    assert ranks_text((0, 1, 2, 5)) == "0-2,5"


def test_piped_text_has_no_escape_codes_and_names_are_not_markup() -> None:
    p = diamond(source=("[red]prompt[/red]", "an\x1b[31mswer"), name="[bold]flow")
    shown = text(p, 160)
    assert "\x1b" not in shown
    assert "[red]prompt[/red]" in shown
    assert "[bold]flow" in shown


def test_a_colour_terminal_gets_colour() -> None:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True, color_system="standard").print(render(diamond()))
    assert "\x1b[36mm0" in out.getvalue()


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (100 * 1024, "100 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (33685504, "32.1 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (9 * 1024**6, "9216 PiB"),
    ],
)
def test_human_bytes(n: float, text: str) -> None:
    assert human_bytes(n) == text


def test_a_notebook_shows_the_tables() -> None:
    shown = plan(
        Flow("few", ("prompt",), (Node("a<b".replace("<", "_"), reads=("prompt",)),)), Placement(2), Workload(3)
    )
    assert shown._repr_html_().startswith("<pre")
    assert "a_b" in shown._repr_html_()
    assert "3 samples per step" in shown._repr_html_()


def test_the_headline_says_where_there_are_fewer_samples_than_replicas() -> None:
    flow = Flow("few", ("prompt",), (Node("a", reads=("prompt",)),))
    _, few, _ = headline(plan(flow, Placement(8), Workload(3)))
    _, enough, _ = headline(plan(flow, Placement(8), Workload(9)))
    assert "3 samples per step, 1 per prompt · 5 of 8 replicas have none" in few
    assert "have none" not in enough
