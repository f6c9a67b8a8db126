"""What happens: the algorithm as a graph of nodes that read and write fields."""

from distflow.flow.graph import SOURCE, Flow, Node
from distflow.flow.listing import from_list
from distflow.flow.trace import FlowFunction, Value, flow, node

__all__ = ["SOURCE", "Flow", "FlowFunction", "Node", "Value", "flow", "from_list", "node"]
