"""DistFlow: RL post-training of language models, fully distributed. Importing this imports no torch."""

from distflow.flow import Flow, Node, flow, node

__all__ = ["Flow", "Node", "flow", "node"]
