"""The protections of the sandbox, their mechanisms, and the cures where a machine or container refuses one."""

import errno
import os
from collections.abc import Mapping

MECHANISMS = ("namespaces", "landlock", "seccomp")
# The protections a sandbox must give: what each does, and the mechanism that it needs.
REQUIRED = {
    "network": ("keep code off the network", "seccomp"),
    "files": ("keep code away from other files", "landlock"),
    "processes": ("keep code from starting and signalling processes", "seccomp"),
}
_NAMES = {"namespaces": "user namespaces", "landlock": "Landlock", "seccomp": "seccomp"}
_PROFILE = "in a container, use a seccomp profile that allows"
# By mechanism and error number: why it does not work, and the cure. Those without a number are for all others.
_CURES: dict[tuple[str, int | None], tuple[str, str]] = {
    ("landlock", errno.EOPNOTSUPP): ("is switched off", "add `landlock` to the kernel's parameter `lsm=`"),
    ("landlock", errno.ENOSYS): (
        "is missing",
        f"use Linux ≥ 5.13 built with it; {_PROFILE} `landlock_*` (docker run --security-opt seccomp=FILE)",
    ),
    ("landlock", None): ("is refused", f"{_PROFILE} `landlock_*` (docker run --security-opt seccomp=FILE)"),
    ("seccomp", errno.EINVAL): ("is missing", "use a kernel built with CONFIG_SECCOMP_FILTER"),
    ("seccomp", errno.ENOSYS): ("is missing", "use Linux on x86_64 or aarch64, built with CONFIG_SECCOMP_FILTER"),
    ("seccomp", None): ("is refused", f"{_PROFILE} the call `seccomp` (docker run --security-opt seccomp=FILE)"),
    ("namespaces", errno.ENOSPC): ("are used up", "raise the sysctl user.max_user_namespaces"),
    ("namespaces", None): (
        "are refused",
        f"{_PROFILE} `unshare` and `mount`; on the host, set the sysctl kernel.unprivileged_userns_clone=1 or"
        " kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}


def explain(mechanism: str, number: int) -> str:
    """Returns on one line why a mechanism does not work, given the number of the error, and the cure."""
    reason, cure = _CURES.get((mechanism, number)) or _CURES[mechanism, None]
    detail = f" ({os.strerror(number)})" if number else ""
    return f"{_NAMES[mechanism]} {reason} here{detail}; {cure}"


def explain_missing(protection: str, refusals: Mapping[str, int]) -> str:
    """Explains a missing protection: what it would prevent, why it does not work, and the cure."""
    purpose, mechanism = REQUIRED[protection]
    return f"cannot {purpose}: {explain(mechanism, refusals.get(mechanism, 0))}"
