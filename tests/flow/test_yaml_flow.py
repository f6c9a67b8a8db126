# mypy: allow-untyped-decorators

import datetime
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import FlowError
from distflow.flow import Flow, Node, flow, from_list, node
from distflow.flow.importing import load
from distflow.run.program import Program

DIAMOND = Path(__file__).parents[2] / "examples" / "diamond"


@node(writes=["response", "tokens"], type="inference")
def generate(batch: Any) -> Any:
    return batch


@node
def score(batch: Any, scale: Any = 1) -> Any:
    return batch


@node(writes=(), type="train", whole_groups=True)
def update(batch: Any) -> Any:
    return batch


@node(reads="response", balance="response")
def penalty(batch: Any) -> Any:
    return batch


CONSTANT = 3


class Base:
    def inherited(self, batch: Any) -> Any:
        return batch


class Judge(Base):
    limit = 3

    def score(self, batch: Any) -> Any:
        return batch

    @node(writes="verdict", type="inference")
    def check(self, batch: Any) -> Any:
        return batch


ROLES = {"judge": Judge, "reward": score}
BATCH = {"id": "generate", "call": "test_yaml_flow:generate", "deps": "data"}


def listed(*entries: Any, roles: dict[str, Any] | None = None, base: Path | None = None) -> Flow:
    """A flow of these entries, with those of ROLES that are called unless `roles` are given."""
    if roles is None:
        calls = [str(e.get("call")).partition(".")[0] for e in entries if isinstance(e, dict)]
        roles = {r: target for r, target in ROLES.items() if r in calls}
    return from_list("f", ("prompt", "answer"), entries, roles, base)


def last(*entries: dict[str, Any]) -> Node:
    return listed(*entries).nodes[-1]


def test_the_diamond_is_the_same_graph_in_both_forms() -> None:
    traced, written = (Program.load(DIAMOND / f"{name}.yaml") for name in ("config", "graph"))
    assert isinstance(traced.config.flow, str)
    assert isinstance(written.config.flow, list)
    assert traced.flow == written.flow
    assert [n.fn for n in traced.flow.nodes] == [n.fn for n in written.flow.nodes]
    assert traced.plan(4).hash == written.plan(4).hash


def test_roles_orders_and_constants_are_the_same_in_both_forms() -> None:
    @flow
    def f(data: Any, judge: Any, reward: Any) -> None:
        rollout = generate(data["prompt"])
        mark = judge.score(rollout, data["answer"])
        verdict = judge.check(rollout["tokens"])
        second = reward(rollout["tokens"], scale=[1, 2], after=verdict)
        less = penalty(rollout, mark)
        update(mark, verdict, second, less)

    written = listed(
        {"id": "generate", "reads": "prompt", "call": "test_yaml_flow:generate"},
        {"id": "judge.score", "reads": ["response", "tokens", "answer"], "call": "judge.score"},
        {"id": "check", "reads": "tokens", "call": "judge.check"},
        {"id": "reward", "reads": "tokens", "call": "reward", "after": "check", "params": {"scale": [1, 2]}},
        {"id": "penalty", "deps": ["generate", "judge.score"], "call": "test_yaml_flow:penalty"},
        {"id": "update", "deps": ["judge.score", "check", "reward", "penalty"], "call": "test_yaml_flow:update"},
    )
    traced = f.trace(("prompt", "answer"), ROLES)
    # A traced method is called `role.method`; the list names nodes as it likes.
    renamed = [{"check": "judge.check"}.get(n.id, n.id) for n in written.nodes]
    assert renamed == [n.id for n in traced.nodes]
    for a, b in zip(traced.nodes, written.nodes, strict=True):
        after = tuple(i.replace("judge.check", "check") for i in a.after)
        assert (a.role, a.type, a.reads, a.writes, a.call, after, a.params, a.whole_groups, a.balance, a.method) == (
            b.role, b.type, b.reads, b.writes, b.call, b.after, b.params, b.whole_groups, b.balance, b.method,
        )  # fmt: skip


def test_deps_read_all_that_those_nodes_write() -> None:
    n = last(BATCH, {"id": "n", "call": "test_yaml_flow:score", "deps": ["generate", "data"]})
    assert n.reads == ("response", "tokens", "prompt", "answer")
    assert n.writes == ("n",)
    assert n.after == ()


def test_with_reads_other_deps_only_order_the_nodes() -> None:
    first = {"id": "first", "call": "test_yaml_flow:score", "deps": "data"}
    n = last(
        BATCH, first, {"id": "n", "call": "test_yaml_flow:score", "deps": ["first", "generate"], "reads": ["tokens"]}
    )
    assert (n.reads, n.after) == (("tokens",), ("first",))


def test_a_dep_that_writes_nothing_is_an_order() -> None:
    n = last(BATCH, BATCH | {"id": "u", "call": "test_yaml_flow:update"}, {"id": "n", "call": "reward", "deps": "u"})
    assert (n.reads, n.after) == ((), ("u",))


def test_an_entry_overrides_the_arguments_of_node() -> None:
    overrides = {"type": "compute", "writes": ["a", "b"], "whole_groups": True, "balance": "prompt", "role": "actor"}
    n = last(BATCH | overrides)
    assert (n.type, n.writes, n.whole_groups, n.balance, n.role) == ("compute", ("a", "b"), True, "prompt", "actor")
    assert last(BATCH | {"writes": []}).writes == ()


def test_role_calls() -> None:
    method, function = listed(
        {"id": "m", "call": "judge.check", "deps": "data"}, {"id": "r", "call": "reward", "deps": "data"}
    ).nodes
    assert (method.role, method.method, method.writes, method.fn) == (
        "judge",
        True,
        ("verdict",),
        Judge.check.__wrapped__,
    )
    assert (function.role, function.method, function.writes) == ("reward", False, ("r",))


ENTRY = {"id": "n", "call": "test_yaml_flow:score"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("score", "node number 1: is 'score', not a mapping of id, role, type"),
        ({"call": "x:y"}, "node number 1: needs 'id', a string"),
        ({"id": 3, "call": "x:y"}, "node number 1: needs 'id', a string"),
        ({"id": "n"}, "node 'n': needs 'call', a string"),
        (ENTRY | {"writs": "x"}, "node 'n': unknown key 'writs'; did you mean 'writes'?"),
        (ENTRY | {1: "x"}, "node 'n': unknown key '1'; known: after, balance, call"),
        (ENTRY | {"deps": ["dta"]}, "node 'n': depends on unknown node 'dta'; did you mean 'data'?"),
        (ENTRY | {"after": ["m"]}, "node 'n': depends on unknown node 'm'"),
        (ENTRY | {"reads": ["promt"]}, "node 'n': reads unknown field 'promt'; did you mean 'prompt'?"),
        (ENTRY | {"reads": [1]}, "node 'n': 'reads' is [1], not a name or a list of names"),
        (ENTRY | {"deps": {"a": 1}}, "node 'n': 'deps' is {'a': 1}, not a name or a list of names"),
        (ENTRY | {"params": [1]}, "node 'n': 'params' is [1], not a mapping of constants"),
        (ENTRY | {"type": "trian"}, "node 'n': unknown type 'trian'; did you mean 'train'?"),
        (
            ENTRY | {"call": "judge.scor"},
            "node 'n': role 'judge' (test_yaml_flow:Judge) has no method 'scor'; did you mean",
        ),
        (ENTRY | {"call": "judge.limit"}, "node 'n': role 'judge' (test_yaml_flow:Judge) has no method 'limit'"),
        (ENTRY | {"call": "judge.inherted"}, "has no method 'inherted'; did you mean 'inherited'?"),
        (
            ENTRY | {"call": "judge"},
            "node 'n': 'judge' is a class; bind it to a role and call one of its methods: 'role.method'",
        ),
        (
            ENTRY | {"call": "test_yaml_flow:Judge"},
            "node 'n': 'test_yaml_flow:Judge' is a class; bind it to a role",
        ),
        (ENTRY | {"call": "test_yaml_flow:CONSTANT"}, "node 'n': 'test_yaml_flow:CONSTANT' is a int, not a function"),
        (
            ENTRY | {"call": "score"},
            "node 'n': call 'score' is neither 'file.py:function' nor 'package.module:function' nor a role;",
        ),
        (
            ENTRY | {"call": "jugde.score"},
            "node 'n': call 'jugde.score' is neither 'file.py:function' nor 'package.module:function' nor a role;"
            " there are none",
        ),
        (
            ENTRY | {"params": {"scal": 2}},
            "node 'n': test_yaml_flow:score has no parameter 'scal'; did you mean 'scale'?",
        ),
        (ENTRY | {"reads": ["prompt", "prompt"]}, "node 'n': reads 'prompt' twice; name it once"),
        (ENTRY | {"writes": ["a", "a"]}, "node 'n': writes 'a' twice; name it once"),
        (ENTRY | {"type": 5}, "node 'n': 'type' is 5, not a string"),
        (ENTRY | {"role": 5}, "node 'n': 'role' is 5, not a string"),
        (ENTRY | {"balance": ["prompt"]}, "node 'n': 'balance' is ['prompt'], not the name of a field"),
        (ENTRY | {"whole_groups": "no"}, "node 'n': 'whole_groups' is 'no', not true or false"),
        (
            ENTRY | {"params": {"scale": datetime.date(2025, 1, 1)}},
            "node 'n': constant 'scale' is a date; constants are plain JSON values",
        ),
        (ENTRY | {"call": "test_yaml_flow:"}, "is not 'package.module:name' or 'path/to/file.py:name'"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(entry: Any, message: str) -> None:
    with pytest.raises(FlowError, match=re.escape(message)):
        listed(entry)


def test_a_misspelt_role_in_a_call_gets_a_suggestion() -> None:
    good = {"id": "m", "call": "judge.score"}
    with pytest.raises(FlowError, match=r"node 'n': call 'jugde.score' .* nor a role; did you mean 'judge'\?"):
        listed(good, ENTRY | {"call": "jugde.score"})


def test_a_file_may_have_the_name_of_a_role(folder: Path) -> None:
    (folder / "judge.py").write_text("def f(batch): ...\n")
    own, method = {"id": "n", "call": "judge.py:f"}, {"id": "m", "call": "judge.score"}
    assert [n.call for n in listed(own, method, base=folder).nodes] == ["judge.py:f", "test_yaml_flow:Judge.score"]


def test_a_role_that_no_node_calls_is_refused() -> None:
    with pytest.raises(FlowError, match="flow 'f': no node calls the role 'judge'; remove it or call it"):
        listed(ENTRY, roles={"judge": Judge})


def test_a_list_without_nodes_is_refused() -> None:
    with pytest.raises(FlowError, match="flow 'f' has no nodes"):
        listed()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of user files; changes to the interpreter by loading them are undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "no_such_module:f",
            "'no_such_module:f' does not import: ModuleNotFoundError: No module named 'no_such_module';"
            " check the name and that it is installed",
        ),
        (
            "imports_on_path:f",
            "'imports_on_path:f' does not import: ModuleNotFoundError: No module named 'no_such_module'"
            " ({folder}/imports_on_path.py:2); check the name and that it is installed",
        ),
        ("test_yaml_flow:scroe", "'test_yaml_flow:scroe' has no 'scroe'; did you mean 'score'?"),
        ("missing.py:f", "'missing.py:f' does not import: there is no file {folder}/missing.py"),
        ("raises.py:f", "'raises.py:f' does not import: ValueError: boom and more ({folder}/raises.py:3)"),
        ("syntax.py:f", "'syntax.py:f' does not import: SyntaxError: invalid syntax ({folder}/syntax.py:2)"),
        (
            "imports.py:f",
            "'imports.py:f' does not import: ModuleNotFoundError: No module named 'no_such_module'"
            " ({folder}/imports.py:2)",
        ),
        ("good.py:ff", "'good.py:ff' has no 'ff'; did you mean 'fff'?"),
        ("good.py:Box.pt", "'good.py:Box.pt' has no 'pt'; did you mean 'put'?"),
    ],
)
def test_a_function_that_does_not_import_is_refused_by_node(folder: Path, call: str, message: str) -> None:
    (folder / "raises.py").write_text("\ndef g():\n    raise ValueError('boom\\n  and more')\n\ng()\n")
    (folder / "syntax.py").write_text("x = 1\ndef f(:")
    (folder / "imports.py").write_text("\nimport no_such_module\n")
    (folder / "imports_on_path.py").write_text("\nimport no_such_module\n")
    (folder / "good.py").write_text("def fff(batch): ...\nclass Box:\n    def put(batch): ...\n")
    sys.path.append(str(folder))
    with pytest.raises(FlowError) as e:
        listed(ENTRY | {"call": call}, base=folder)
    assert str(e.value) == "node 'n': " + message.format(folder=folder)  # all of it: one line


def test_a_file_is_loaded_once_sees_its_neighbours_and_may_be_fixed(folder: Path) -> None:
    (folder / "neighbour_of_main.py").write_text("n = 1")
    main = folder / "main_of_test.py"
    main.write_text("from neighbour_of_main import n, missing\n")
    with pytest.raises(FlowError, match="cannot import name 'missing'"):
        load("main_of_test.py:n", "flow", folder)
    main.write_text("from neighbour_of_main import n\nclass C:\n    def m(self): ...\n")
    assert load("main_of_test.py:n", "flow", folder) == 1
    assert load(f"{main}:C.m", "flow") is load("main_of_test.py:C", "flow", folder).m
    assert "main_of_test" not in sys.modules


def test_a_function_is_referenced_by_the_name_of_its_file(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b" / "c").mkdir(parents=True)
    for x in ("a", "b/c"):
        (folder / x / "own_nodes.py").write_text(
            "from distflow import node\n@node\ndef f(batch): ...\nclass Box:\n    def put(self, batch): ...\n"
        )

    def calls(file: str, base: Path) -> list[str]:
        box = load(f"{file}:Box", "roles.box", base)
        entries = {"id": "n", "call": f"{file}:f"}, {"id": "m", "call": "box.put"}
        return [n.call for n in listed(*entries, roles={"box": box}, base=base).nodes]

    expected = ["own_nodes.py:f", "own_nodes.py:Box.put"]
    assert calls("own_nodes.py", folder / "a") == expected
    assert calls("b/c/own_nodes.py", folder) == expected  # the second file of that name
    sys.path.append(str(folder / "a"))
    importlib.import_module("own_nodes")  # the same file, imported as a module
    assert calls(str(folder / "a" / "own_nodes.py"), folder) == expected


def test_files_of_the_same_name_are_different_modules(folder: Path) -> None:
    for x in ("a", "b"):
        (folder / x).mkdir()
        (folder / x / "same_name.py").write_text(f"x = '{x}'")
    assert [load("same_name.py:x", "flow", folder / x) for x in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize("imported", [True, False])
def test_a_file_never_shadows_an_installed_module(folder: Path, imported: bool) -> None:
    sys.modules.pop("colorsys", None)  # the fixture brings it back
    if imported:
        importlib.import_module("colorsys")
    (folder / "colorsys.py").write_text("def f(batch): ...")
    load("colorsys.py:f", "flow", folder)
    assert hasattr(importlib.import_module("colorsys"), "rgb_to_hsv")
