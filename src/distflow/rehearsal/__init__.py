"""A worker of a run on devices that are not here: the trainer and the engine themselves, on tensors without memory."""
