"""Programs that try to be rewarded for nothing, right programs, and the forms of tests that both are given."""

from redteam.forms import FORMS, FUNCTION_FORMS, STDIN_FORMS
from redteam.processes import PROCESSES, TIME
from redteam.right import RIGHT
from redteam.values import VALUES

CHEATS = VALUES | PROCESSES
# Cheats that use up whatever time they get.
HANGING = {
    *TIME, "answers without end", "has every length", "iterates for ever", "makes lists endless", "overflows the stack",
    "prints for ever",
}  # fmt: skip

__all__ = ["CHEATS", "FORMS", "FUNCTION_FORMS", "HANGING", "RIGHT", "STDIN_FORMS"]
