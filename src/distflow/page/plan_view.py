"""A plan, read from its JSON, as a page draws it: boxes in columns and lanes, and lines between them."""

from collections.abc import Mapping
from typing import Any

Plan = Mapping[str, Any]


def plan_view(plan: Plan) -> dict[str, Any]:
    """Returns lanes (sets of ranks), nodes with their place, and arcs with the move that carries them."""
    partitions = {p["id"]: p for p in plan["partitions"]}
    lanes = list(dict.fromkeys(partitions[n["partition"]]["ranks"] for n in plan["nodes"]))
    arcs = _arcs(plan)
    depth = _depth(plan, arcs)
    names = {ranks: name for name, ranks in plan["rank_sets"].items()}
    return {
        "flow": plan["flow"],
        "workers": plan["workers"],
        "samples": plan["samples"],
        "per_prompt": plan["samples_per_prompt"],
        "lanes": [{"ranks": ranks, "name": names.get(ranks, "")} for ranks in lanes],
        "nodes": [_node(n, partitions[n["partition"]], lanes, depth[n["id"]]) for n in plan["nodes"]],
        "arcs": arcs,
    }


def _node(node: Plan, partition: Plan, lanes: list[str], column: int) -> dict[str, Any]:
    return {
        "id": node["id"],
        "role": node["role"],
        "type": node.get("type", "load"),
        "reads": node.get("reads", []),
        "writes": node["writes"],
        "lane": lanes.index(partition["ranks"]),
        "column": column,
        "dp": partition["dp"],
        "sp": partition.get("sp", 1),
        "tp": partition["tp"],
    }


def _arcs(plan: Plan) -> list[dict[str, Any]]:
    """Returns one arc per pair of nodes and way: local, by a move, or the weights that go to the next step."""
    latest: dict[tuple[str, str], tuple[str, str]] = {}  # (partition, field) → (who wrote it, the move it came by)
    nodes = {n["id"]: n for n in plan["nodes"]}
    arcs: dict[tuple[str, str, str], dict[str, Any]] = {}
    syncs: list[str] = []  # roles whose weights are synced before the next node
    generates: list[tuple[str, str]] = []  # (role, node that generates with its weights)
    for task in plan["tasks"]:
        match task["do"]:
            case "load":
                source = plan["nodes"][0]["id"]
                latest |= {(task["partition"], f): (source, "") for f in task["fields"]}
            case "move":
                for f in task["fields"]:
                    writer, _ = latest.get((task["from"], f), (plan["nodes"][0]["id"], ""))
                    latest[task["to"], f] = writer, task["id"]
            case "run":
                node = nodes[task["node"]]
                for f in node["reads"]:
                    writer, move = _origin(latest, task["partition"], f)
                    arc = arcs.setdefault((writer, node["id"], move), _arc(writer, node["id"], move))
                    arc["fields"].append(f)
                latest |= {(task["partition"], f): (node["id"], "") for f in node["writes"]}
                generates += [(role, node["id"]) for role in syncs]
                syncs = []
            case "weights":
                syncs.append(task["role"])
    last_trains = {n["role"]: n["id"] for n in plan["nodes"] if n.get("type") == "train"}
    for role, reader in generates:
        if writer := last_trains.get(role):
            arcs[writer, reader, "weights"] = _arc(writer, reader, f"{role} weights", "weights")
    return list(arcs.values())


def _arc(writer: str, reader: str, move: str, kind: str | None = None) -> dict[str, Any]:
    return {"from": writer, "to": reader, "kind": kind or ("move" if move else "local"), "move": move, "fields": []}


def _origin(latest: dict[tuple[str, str], tuple[str, str]], partition: str, field: str) -> tuple[str, str]:
    """Returns who wrote a field and how it came; after a resample it is under the name of another partition."""
    if (partition, field) in latest:
        return latest[partition, field]
    return next((v for (_, f), v in reversed(latest.items()) if f == field), ("", ""))


def _depth(plan: Plan, arcs: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the column of each node: one after the last node that it reads from."""
    depth: dict[str, int] = {}
    for node in plan["nodes"]:
        before = [a["from"] for a in arcs if a["to"] == node["id"] and a["kind"] != "weights"]
        before += node.get("after", [])
        depth[node["id"]] = 1 + max((depth.get(b, -1) for b in before), default=-1)
    return depth
