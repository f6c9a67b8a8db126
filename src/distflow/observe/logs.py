"""Sends the messages of the package to stderr. Imports no torch."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from distflow.errors import ConfigError, cut, printable, suggest

LOG_LEVEL = "DISTFLOW_LOG_LEVEL"  # environment variable, which workers inherit


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(keep: bool = False) -> None:
    """Sends what the package logs to stderr, as `distflow: …`; if `keep` is set, unless it goes elsewhere already."""
    if keep and logging.getLogger("distflow").handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("distflow: %(message)s"))
    package = logging.getLogger("distflow")
    package.handlers, package.propagate = [handler], False
    package.setLevel(logging.INFO)
    level, levels = os.environ.get(LOG_LEVEL, "info").upper(), ("DEBUG", "INFO", "WARNING", "ERROR")
    if level not in levels:
        raise ConfigError(f"{LOG_LEVEL}: unknown level '{cut(level)}'{suggest(level, levels)}")
    package.setLevel(level)


@contextmanager
def logged_errors() -> Iterator[list[str]]:
    """Gives a list of the errors that are logged inside."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger("distflow")
    package.addHandler(handler)
    try:
        yield messages
    finally:
        package.removeHandler(handler)
