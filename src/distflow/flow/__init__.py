"""The algorithm as a graph of nodes that read and write fields."""

from distflow.flow.graph import SOURCE, Flow, Node
from distflow.flow.trace import FlowFunction, Value, flow, node
from distflow.flow.yaml_flow import from_list

__all__ = ["SOURCE", "Flow", "FlowFunction", "Node", "Value", "flow", "from_list", "node"]
