"""Programs that try to be rewarded for nothing, right programs, and the forms of tests that both are given."""

from redteam.aimed import AIMED, AIMED_NUMPY
from redteam.forms import FORMS, FUNCTION_FORMS, STDIN_FORMS
from redteam.processes import PROCESSES, TIME
from redteam.right import RIGHT, RIGHT_NUMPY
from redteam.values import VALUES

CHEATS = VALUES | PROCESSES
# Cheats that use up whatever time they get.
HANGING = {
    *TIME, "answers without end", "has every length", "iterates for ever", "makes lists endless", "overflows the stack",
    "prints for ever",
}  # fmt: skip

__all__ = [
    "AIMED", "AIMED_NUMPY", "CHEATS", "FORMS", "FUNCTION_FORMS", "HANGING", "RIGHT", "RIGHT_NUMPY", "STDIN_FORMS",
]  # fmt: skip
