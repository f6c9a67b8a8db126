# mypy: allow-untyped-decorators

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from distflow.errors import FlowError
from distflow.flow import Flow, Node, Value, flow, node


@node(writes=["response", "tokens"], type="inference")
def generate(batch: Any, temperature: Any = 1.0) -> Any:
    return batch


@node
def score(batch: Any, scale: Any = 1) -> Any:
    return f"scored {batch} by {scale}"


@node(reads="response", balance="response")
def advantage(batch: Any) -> Any:
    return batch


@node(writes=(), type="train", whole_groups=True)
def update(batch: Any) -> Any:
    return batch


def plain(batch: Any) -> Any:
    """Not a node: iterates over what it gets."""
    return list(batch["response"])


def open_ended(batch: Any, **options: Any) -> Any:
    return batch


class Judge:
    limit = 3

    def score(self, batch: Any) -> Any:
        return batch

    @node(id="strict", writes="verdict", type="inference")
    def check(self, batch: Any, scale: Any = 1) -> Any:
        return batch


class Lenient(Judge):
    pass


def trace(body: Callable[..., Any], **roles: Any) -> Flow:
    return flow(body).trace(("prompt", "answer"), roles)


def only(body: Callable[..., Any], **roles: Any) -> Node:
    """The last node of a traced flow."""
    return trace(body, **roles).nodes[-1]


def refusal(body: Callable[..., Any], **roles: Any) -> str:
    with pytest.raises(FlowError) as e:
        trace(body, **roles)
    return str(e.value)


def test_tracing_a_function_gives_its_graph() -> None:
    @flow
    def grpo(prompts: Any) -> None:
        rollout = generate(prompts["prompt"], temperature=0.5)
        better = advantage(rollout, score(rollout["tokens"], prompts["answer"]))
        update(rollout, better)

    assert grpo.trace(("prompt", "answer")) == Flow(
        "grpo",
        ("prompt", "answer"),
        (
            Node(
                "generate",
                type="inference",
                reads=("prompt",),
                writes=("response", "tokens"),
                call="test_trace:generate",
                params={"temperature": 0.5},
            ),
            Node("score", reads=("tokens", "answer"), writes=("score",), call="test_trace:score"),
            Node(
                "advantage",
                reads=("response",),
                writes=("advantage",),
                after=("score",),  # nothing of it is read, but it was passed
                balance="response",
                call="test_trace:advantage",
            ),
            Node(
                "update",
                type="train",
                reads=("response", "tokens", "advantage"),
                call="test_trace:update",
                whole_groups=True,
            ),
        ),
    )


def test_a_node_keeps_the_users_own_function() -> None:
    fn = only(lambda data: score(data)).fn
    assert fn is not None
    assert fn("x") == "scored x by 1"
    assert not hasattr(fn, "__distflow__")


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        (lambda data: score(data), ("prompt", "answer")),
        (lambda data: score(data["answer"], data["prompt"]), ("answer", "prompt")),
        (lambda data: score(data[["answer", "prompt"]]), ("answer", "prompt")),
        (lambda data: score(data["prompt"], data), ("prompt", "answer")),
        (lambda data: score(generate(data)["tokens"], data["answer"]), ("tokens", "answer")),
    ],
)
def test_reads_are_the_fields_of_the_values_passed(body: Callable[..., Any], reads: tuple[str, ...]) -> None:
    assert only(body).reads == reads


def test_repeated_calls_get_ids_and_fields_of_their_own() -> None:
    def thrice(data: Any) -> None:
        score(score(score(data)))

    assert [(n.id, n.reads, n.writes) for n in trace(thrice).nodes] == [
        ("score", ("prompt", "answer"), ("score",)),
        ("score_2", ("score",), ("score_2",)),
        ("score_3", ("score_2",), ("score_3",)),
    ]


def test_a_renamed_node_is_another_node_of_the_same_function() -> None:
    def two(data: Any) -> None:
        rollout = generate(data)
        update(score(rollout), node(score, id="strict", writes="penalty", role="judge")(rollout, scale=2))

    f = trace(two)
    strict = f.node("strict")
    assert strict == Node(
        "strict",
        "judge",
        reads=("response", "tokens"),
        writes=("penalty",),
        call="test_trace:score",
        params={"scale": 2},
    )
    assert f.node("score").writes == ("score",)
    assert f.node("update").reads == ("score", "penalty")
    renamed = node(generate, id="draft").__distflow__  # other attributes stay as they were
    assert (renamed.writes, renamed.type) == (("response", "tokens"), "inference")


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: (v, v)])
def test_after_orders_without_reading(wrap: Callable[[Any], Any]) -> None:
    def body(data: Any) -> None:
        first = generate(data)
        score(data["answer"], after=wrap(first))

    n = only(body)
    assert (n.reads, n.after, n.params) == (("answer",), ("generate",), {})


def test_after_the_data_is_no_order() -> None:
    assert only(lambda data: score(data["answer"], after=data)).after == ()


def test_a_function_implements_a_role() -> None:
    def body(data: Any, reward: Any) -> None:
        reward(data["answer"], scale=3)

    assert only(body, reward=score) == Node(
        "reward", "reward", reads=("answer",), writes=("reward",), call="test_trace:score", params={"scale": 3}
    )
    assert only(body, reward=open_ended).call == "test_trace:open_ended"  # needs no @node
    named = node(open_ended, id="mark", role="judge")
    assert (only(body, reward=named).id, only(body, reward=named).role) == ("mark", "judge")


def test_a_class_implements_a_role() -> None:
    def body(data: Any, judge: Any) -> None:
        judge.check(judge.score(data["answer"]), scale=3)

    first, second = trace(body, judge=Judge).nodes
    assert first == Node(
        "judge.score",
        "judge",
        reads=("answer",),
        writes=("judge.score",),
        call="test_trace:Judge.score",
        method=True,
    )
    assert second == Node(
        "strict",
        "judge",
        "inference",
        reads=("judge.score",),
        writes=("verdict",),
        call="test_trace:Judge.check",
        params={"scale": 3},
        method=True,
    )
    assert first.fn is Judge.score
    assert trace(body, judge=Lenient).node("strict").role == "judge"


def test_roles_may_be_keyword_only() -> None:
    def body(data: Any, *, reward: Any, judge: Any) -> None:
        reward(judge.score(data))

    assert [n.call for n in trace(body, judge=Judge, reward=score).nodes] == [
        "test_trace:Judge.score",
        "test_trace:score",
    ]
    assert "role 'judge' has no implementation" in refusal(body, reward=score)


def test_outside_a_flow_a_node_is_a_plain_function() -> None:
    assert score("x", scale=2) == "scored x by 2"
    assert score.__name__ == "score"
    assert node(plain, id="p")({"response": "ab"}) == ["a", "b"]


def test_a_symbol_that_escaped_its_flow_is_refused() -> None:
    kept: list[Value] = []
    trace(lambda data: kept.append(score(data)))
    with pytest.raises(FlowError, match="'score' was called on a symbol outside a flow"):
        score(kept[0])


def using(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda data: function(generate(data))


@pytest.mark.parametrize(
    ("body", "use"),
    [
        (using(lambda v: 1 if v else 2), "used in a computation (bool)"),
        (using(lambda v: v and 1), "used in a computation (bool)"),
        (using(lambda v: list(map(str, v))), "iterated over"),
        (using(lambda v: "x" in v), "used in a computation (contains)"),
        (using(lambda v: len(v)), "used in a computation (len)"),
        (using(lambda v: v.tokens), "asked for its attribute 'tokens' (select a field with [\"tokens\"])"),
        (using(lambda v: v[["response", 3]]), "indexed by ['response', 3] (select fields by name)"),
        (using(lambda v: v[0]), "indexed by 0 (select fields by name)"),
        (using(lambda v: v[1:3]), "indexed by slice(1, 3, None) (select fields by name)"),
        (using(lambda v: v + 1), "used in a computation (add)"),
        (using(lambda v: 1 - v), "used in a computation (rsub)"),
        (using(lambda v: v > 0), "used in a computation (gt)"),
        (using(lambda v: v == 1), "used in a computation (eq)"),
        (using(lambda v: v != 1), "used in a computation (ne)"),
        (using(lambda v: v in [1, 2]), "used in a computation (eq)"),
        (using(lambda v: -v), "used in a computation (neg)"),
        (using(lambda v: float(v)), "used in a computation (float)"),
        (using(plain), "iterated over"),
    ],
)
def test_a_symbol_is_not_data(body: Callable[..., Any], use: str) -> None:
    message = refusal(body)
    assert f"the value of node 'generate' was {use}" in message
    assert "mark that function with @node" in message  # the way out


def test_a_symbol_may_be_a_key() -> None:
    def body(data: Any) -> None:
        first, second = score(data), score(data)
        names = {first: "first", second: "second"}
        assert (names[first], names[second]) == ("first", "second")
        update(first)

    assert only(body).reads == ("score",)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda data: score(data["promt"]), "the data has no column 'promt'; did you mean 'prompt'?"),
        (using(lambda v: v["token"]), "node 'generate' writes no field 'token'; did you mean 'tokens'?"),
        (
            lambda data: score(data, 3),
            "node 'score': positional arguments and `after` are values of other nodes, not 3",
        ),
        (
            lambda data: score(data, after=["generate"]),
            "node 'score': positional arguments and `after` are values of other nodes, not 'generate'",
        ),
        (
            lambda data: score(data, after="generate"),
            "node 'score': positional arguments and `after` are values of other nodes, not 'generate'",
        ),
        (lambda data: score(data, after=None), "positional arguments and `after` are values of other nodes, not None"),
        (lambda data: score(data, scale=data), "node 'score': the value of 'data' is passed as 'scale='"),
        (lambda data: score(data, scale={1, 2}), "node 'score': constant 'scale' is a set; constants are plain JSON"),
        (lambda data: score(data, scale=score), "node 'score': constant 'scale' is a function"),
        (
            lambda data: score(data, scal=2),
            "node 'score': test_trace:score has no parameter 'scal'; did you mean 'scale'?",
        ),
        (lambda data: score(data, zzzzz=2), "node 'score': test_trace:score has no parameter 'zzzzz'; known: "),
        (lambda data: None, "flow '<lambda>' has no nodes"),
        (lambda: None, "takes no parameter; the first one must be the data"),
        (lambda data: update(node(score, writes="prompt")(data)), "node 'score': field 'prompt' has two writers"),
    ],
)
def test_a_wrong_call_is_refused_by_name(body: Callable[..., Any], message: str) -> None:
    assert message in refusal(body)


@pytest.mark.parametrize("constant", [None, True, 1.5, "x", [1, [2]], {"a": {"b": None}}])
def test_constants_are_json(constant: Any) -> None:
    assert only(lambda data: score(data, scale=constant)).params == {"scale": constant}


def test_a_function_with_open_keywords_takes_any_constant() -> None:
    def body(data: Any, reward: Any) -> None:
        reward(data, anything=1)

    assert only(body, reward=open_ended).params == {"anything": 1}
    assert "test_trace:plain has no parameter 'anything'" in refusal(body, reward=plain)


def two_roles(data: Any, judge: Any, reward: Any) -> None:
    reward(judge.scor(data))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"judge": Judge},
            "flow 'two_roles': role 'reward' has no implementation; name one: `roles: {reward: file.py:function}`",
        ),
        ({"jugde": Judge}, "flow 'two_roles' has no role 'jugde'; did you mean 'judge'?"),
        ({"data": Judge}, "flow 'two_roles' has no role 'data'"),
        (
            {"judge": Judge, "reward": score},
            "node 'judge.scor': role 'judge' (test_trace:Judge) has no method 'scor'; did you mean 'score'?",
        ),
        (
            {"judge": Lenient, "reward": score},  # an inherited method
            "node 'judge.scor': role 'judge' (test_trace:Lenient) has no method 'scor'; did you mean 'score'?",
        ),
    ],
)
def test_a_wrong_role_is_refused(roles: dict[str, Any], message: str) -> None:
    assert message in refusal(two_roles, **roles)


class Empty:
    limit = 3


@pytest.mark.parametrize(
    ("target", "message"),
    [
        # A class is called instead of its method.
        (Judge, "role 'judge' is the class test_trace:Judge; call one of its methods: check, score"),
        (Lenient, "role 'judge' is the class test_trace:Lenient; call one of its methods: check, score"),
        (Empty, "role 'judge' is the class test_trace:Empty; it has no methods to call"),
        (3, "role 'judge' is bound to an object of type int; name a function or a class"),
        (functools.partial(plain), "role 'judge' is bound to an object of type partial; name a function or a class"),
        (Judge(), "role 'judge' is bound to an object of type Judge; name a function or a class"),
        (len, "role 'judge' is bound to an object of type builtin_function_or_method; name a function or a class"),
    ],
)
def test_a_role_bound_to_the_wrong_type_is_refused_by_name(target: Any, message: str) -> None:
    assert refusal(lambda data, judge: judge(data), judge=target).partition(" (test_trace.py:")[0] == message


def test_a_method_of_a_function_is_refused_by_role() -> None:
    assert re.search(r"\bjudge\b", refusal(lambda data, judge: judge.score(data), judge=score))


def test_a_class_called_with_constants_is_refused_by_role() -> None:
    assert "role 'judge' is the class" in refusal(lambda data, judge: judge(data, scale=3), judge=Judge)


def test_passing_a_value_without_fields_orders_the_nodes() -> None:
    n = only(lambda data: score(update(generate(data))))
    assert (n.reads, n.after) == ((), ("update",))


@node
def peek(batch: Any = None, after: Any = None) -> Any:
    raise RuntimeError("a node was run while its flow was traced")


@pytest.mark.parametrize(("call", "after"), [(lambda v: peek(after=v), ("generate",)), (lambda v: peek(), ())])
def test_inside_a_flow_a_node_is_traced_and_never_run(call: Callable[[Any], Any], after: tuple[str, ...]) -> None:
    n = only(using(call))
    assert (n.id, n.reads, n.after) == ("peek", (), after)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda v: peek(batch=v),
            "node 'peek': the value of 'generate' is passed as 'batch='; pass values by position",
        ),
        (lambda v: peek(3), "node 'peek': positional arguments and `after` are values of other nodes, not 3"),
    ],
)
def test_inside_a_flow_a_wrong_call_is_refused_and_never_run(call: Callable[[Any], Any], message: str) -> None:
    assert message in refusal(using(call))


def ending(value: Any, *, shared: float = 1.0, own: str = "theirs", **rest: Any) -> None:
    score(value, scale=shared, **rest)


def test_a_flow_has_the_constants_of_the_function_it_passes_them_to() -> None:
    @flow(constants_of=ending)
    def traced(data: Any, *, scale: str = "std", own: str = "mine", **rest: Any) -> None:
        ending(data, **rest)

    assert traced.roles == []
    assert traced.constants == {"shared": 1.0, "own": "mine", "scale": "std"}
    assert traced.trace(("x",)).node("score").params == {"scale": 1.0}
    assert traced.trace(("x",), {}, {"shared": 2.0}).node("score").params == {"scale": 2.0}
    with pytest.raises(FlowError, match="has no constant 'sharde'; did you mean 'shared'"):
        traced.trace(("x",), {}, {"sharde": 1})


def test_an_error_names_the_line_of_the_flow() -> None:
    @flow
    def branches(data: Any) -> None:
        if score(data) > 0:
            update(data)

    @flow
    def stumbles(data: Any) -> None:
        ending()  # type: ignore[call-arg]

    first = branches.fn.__code__.co_firstlineno
    with pytest.raises(FlowError, match=rf"used in a computation \(gt\).* \(test_trace.py:{first + 2}\)$"):
        branches.trace(("x",))
    first = stumbles.fn.__code__.co_firstlineno
    with pytest.raises(FlowError, match=rf"flow 'stumbles': TypeError: ending.* \(test_trace.py:{first + 2}\)$"):
        stumbles.trace(("x",))
