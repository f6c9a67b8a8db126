"""Says in one line that a command was interrupted (Ctrl-C) while it was still being imported, instead of a traceback.

Imported first of all, and of effect only in the process of a command: `distflow …` or `python -m distflow …`.
"""

import os
import sys
from types import TracebackType


def _say(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("distflow: stopped by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, where)


if os.path.basename(sys.argv[0]) in ("-m", "distflow"):
    sys.excepthook = _say
