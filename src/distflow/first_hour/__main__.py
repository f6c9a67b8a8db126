"""Does a part of a step in a process of its own, which may fail or hang: `python -m distflow.first_hour PART JSON`.

The last line that it prints is its answer, as JSON.
"""

import json
import sys
from importlib import import_module
from typing import Any

from distflow.util.parent import end_with_parent

PARTS = ("facts", "models", "operations", "launches", "prediction")


def main(part: str, given: dict[str, Any]) -> None:
    end_with_parent()
    assert part in PARTS
    module = import_module(f"distflow.first_hour.{part}")
    print(json.dumps(module.answer(**given)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
