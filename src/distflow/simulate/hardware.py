"""Hardware as small data files: devices, links, CPU costs and efficiencies. Rates are bytes or FLOPs per second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from distflow.config.schema import Section
from distflow.config.yaml import parse
from distflow.errors import ConfigError, cut, suggest

FOLDER = Path(__file__).parent / "hardware"


class Device(Section):
    """The device of one worker."""

    flops: float = Field(gt=0)  # peak, bfloat16 on GPUs
    memory: float = Field(gt=0)  # bytes
    memory_rate: float = Field(gt=0)
    kind: Literal["accelerator", "cpu"] = "accelerator"
    spread: float = Field(0.0, ge=0, le=1)  # of the speed of devices of one kind: σ of its logarithm


class Link(Section):
    """A link with `rate` in each direction; `per`: each worker has one, or the workers of a host share one."""

    rate: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    per: Literal["worker", "host"] = "worker"


class Cpu(Section):
    """The CPU costs of communication. `cores` are those of a worker, of a host, or of all hosts together."""

    message_s: float = Field(ge=0)  # to send or to receive one message
    byte_s: float = Field(0.0, ge=0)  # to send or to receive one byte over a socket
    pack_rate: float = Field(gt=0)  # of packing samples to send, and copying samples that stay
    sample_s: float = Field(0.0, ge=0)  # to read a header and route one sample of the step; every rank reads all
    cores: float = Field(1.0, gt=0)
    per: Literal["worker", "host", "all"] = "worker"


class Controller(Section):
    """The driver process of a single-controller framework, for comparison."""

    rate: float = Field(gt=0)  # of its network link
    serialise_rate: float = Field(gt=0)  # encoding or decoding, one process
    call_s: float = Field(ge=0)  # to dispatch one call to one worker, or to collect its answer
    memory: float = Field(gt=0)  # bytes of its host
    copies: float = Field(ge=1)  # of the batch that are alive at once


class Efficiency(Section):
    """Achieved fractions of the peak, what a pass moves between its products, and the fixed cost of a decoding step."""

    linear: float = Field(gt=0, le=1)  # products with parameters, of many tokens
    attention: float = Field(gt=0, le=1)  # of long sequences
    activation_bytes: float = Field(ge=0)  # by what is between the products: of each token, layer and hidden number
    expert_bytes: float = Field(ge=0)  # on the way to experts and back: of each token, layer, expert and hidden number
    vocab_bytes: float = Field(ge=0)  # by the log-probs: of each token and word of the vocabulary
    decode_memory: float = Field(gt=0, le=1)
    decode_flops: float = Field(gt=0, le=1)
    network: float = Field(gt=0, le=1)
    decode_step_s: float = Field(ge=0)  # scheduling, sampling and launching kernels, per decoding step


class Hardware(Section):
    """A kind of cluster. `workers_per_host` workers, one per device, are on each host."""

    name: str
    about: str
    workers_per_host: int = Field(gt=0)
    host_memory: float = Field(gt=0)
    device: Device
    local: Link  # between workers of a host: NVLink, PCIe or shared memory
    network: Link  # between hosts
    cpu: Cpu
    controller: Controller
    efficiency: Efficiency


def known_hardware() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.yaml"))


def load_hardware(name: str, **changes: Mapping[str, Any]) -> Hardware:
    """Reads a hardware file of the package by name, or any file by path.

    `changes` replace keys of a section: `load_hardware("namespaces", network={"rate": 125e6})`.
    """
    path = FOLDER / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
    elif not path.exists():
        raise ConfigError(
            f"--hardware: there is neither '{cut(name)}' nor a file of that name{suggest(name, known_hardware())}"
        )
    try:
        raw = parse(path.read_text())
    except OSError as e:
        raise ConfigError(f"--hardware: {path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"--hardware: {path} is not YAML: {cut(str(e), 400)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"--hardware: {path} is not a mapping of keys; copy one of {FOLDER}")
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values}
    try:
        return Hardware.model_validate(raw)
    except ValidationError as e:
        problems = (f"'{'.'.join(map(str, p['loc']))}': {p['msg'][0].lower()}{p['msg'][1:]}" for p in e.errors()[:5])
        raise ConfigError(f"--hardware: {path}: {'; '.join(problems)}") from None
