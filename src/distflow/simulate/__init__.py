"""Predicts a plan on other hardware: step time, bytes on every link, memory, idle time. Imports no torch."""

from distflow.config.model_shape import ModelShape, load_model
from distflow.plan.field_bytes import FieldBytes
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware, load_hardware
from distflow.simulate.result import SimulatedStep
from distflow.simulate.walk import simulate

__all__ = [
    "Costs",
    "FieldBytes",
    "Hardware",
    "ModelShape",
    "SimulatedStep",
    "load_hardware",
    "load_model",
    "simulate",
]
