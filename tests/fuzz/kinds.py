"""All kinds of input that come from outside."""

from fuzz.checkpoints import Checkpoints
from fuzz.configs import Configs
from fuzz.graphs import Graphs
from fuzz.harness import Kind
from fuzz.outputs import Outputs
from fuzz.rewards import Rewards
from fuzz.rows import DataRows
from fuzz.words import Words

KINDS: tuple[type[Kind], ...] = (Configs, Graphs, DataRows, Checkpoints, Rewards, Outputs, Words)
