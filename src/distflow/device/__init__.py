"""The parts that depend on the device: its offer, the choices for it with reasons, and the memory of a run."""
