"""Checks environments before anything is generated: their columns, rows and the chat template."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.agents.spec import Description, EnvironmentSpec
from distflow.config.schema import EnvironmentConfig, McpServer
from distflow.dataset.view import DatasetView
from distflow.errors import ConfigError, DataError, shown, suggest

if TYPE_CHECKING:
    from distflow.agents.env_pool import EnvPool
    from distflow.model.text import Text

COLUMN = "environment"  # of the data: names the environment of a row


def start_env_pool(environments: Mapping[str, EnvironmentConfig], base: Path) -> "EnvPool":
    """Starts the processes that import the environments' code."""
    from distflow.agents.env_pool import EnvPool

    specs = [
        EnvironmentSpec(name, e.call, e.tools, e.command, e.args, e.kind, e.python, e.time_limit_s, _plain(e.mcp))
        for name, e in environments.items()
    ]
    functions = {f.name or f.call: f for e in environments.values() for f in e.rewards}
    given = [{"name": name, "call": f.call, "args": f.args} for name, f in functions.items()]
    return EnvPool(specs, base, reward_functions=given)


def _plain(servers: Mapping[str, McpServer]) -> dict[str, dict[str, Any]]:
    return {name: server.model_dump() for name, server in servers.items()}


def check_columns(names: Sequence[str], descriptions: Sequence[Description], fields: Sequence[str], where: str) -> None:
    """Raises if an environment needs a column that the data does not have; `where` starts the message."""
    for name, description in zip(names, descriptions, strict=True):
        for column in description.columns:
            if column not in fields:
                raise ConfigError(
                    f"{where}environment '{name}' needs the column '{column}'{suggest(column, fields)}"
                    " (data.rename gives a column another name)"
                )


def check_rows(
    names: Sequence[str],
    descriptions: Sequence[Description],
    rows: DatasetView,
    rank: int = 0,
    workers: int = 1,
) -> None:
    """Raises if a row names an environment that there is not; each worker looks at a share of the rows."""
    known: Sequence[str] = names if len(names) > 1 else descriptions[0].choices
    if len(names) > 1 and COLUMN not in rows.column_names:
        return  # ratios decide
    for i in range(rank, len(rows), workers) if known else ():
        value = rows[i].get(COLUMN)
        if value not in known:
            hint = suggest(value, known) if isinstance(value, str) else f"; known: {', '.join(known)}"
            raise DataError(
                f"{rows.location(i)}: the column '{COLUMN}' is {shown(value)}, and there is no such environment{hint}"
            )


def check_environments(
    environments: Mapping[str, EnvironmentConfig],
    base: Path,
    text: "Text",
    max_tokens: int,
    data: Sequence[DatasetView],
) -> Iterator[str]:
    """Does all of it in one process, as `distflow check` does; yields a line for each environment."""
    from distflow.agents.runtime import make_runtimes

    env_pool = start_env_pool(environments, base)
    try:
        descriptions = env_pool.describe()
    finally:
        env_pool.close()
    for rows, where in zip(data, ("", "eval: "), strict=False):
        check_columns(list(environments), descriptions, rows.column_names, where)
        check_rows(list(environments), descriptions, rows)
    make_runtimes(environments, descriptions, text, max_tokens)
    for (name, e), description in zip(environments.items(), descriptions, strict=True):
        tools = sorted({_tool_name(t) for tools in description.tools.values() for t in tools})
        listed = f", tools {', '.join(tools)}" if tools else ""
        yield f"environ.  {name}: {description.kind}{listed}; at most {e.max_turns} turns"


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))
