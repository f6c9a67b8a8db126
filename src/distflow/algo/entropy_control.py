"""A controller of the entropy bonus, which is on while the entropy of the policy is below a target."""

from distflow.errors import ConfigError


def entropy_weight(weight: float, entropy: float, target: float, step: float, highest: float) -> float:
    """Returns the weight of the next update: one `step` up at an entropy up to the target, else one down, to 0."""
    for name, value in (("target", target), ("step", step), ("highest weight", highest)):
        if not value >= 0:
            raise ConfigError(f"the control of the entropy has a {name} of {value}; it must be 0 or more")
    return min(weight + step, highest) if entropy <= target else max(weight - step, 0.0)


def applied_weight(weight: float, last_entropy: float | None, target: float) -> float:
    """Returns the weight that an update has: 0 while the entropy, that of the update before, is above the target."""
    return 0.0 if last_entropy is not None and last_entropy > target else weight
