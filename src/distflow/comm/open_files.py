"""The limit of open files: raised as far as the system permits, and named where it is reached."""

import errno
import resource

from distflow.errors import DistflowError


def raise_open_files_limit(workers: int) -> None:
    """Raises the limit of open files as far as the system permits, and checks that it is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS has another, lower limit
            pass
    # Two transports, each with connections to and from log N peers, some with shared memory, and to others with data.
    needed = 128 + 16 * workers.bit_length()
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise DistflowError(
            f"the limit of open files is {soft}, but a worker of {workers} needs about {needed};"
            " raise it with `ulimit -n` (as root, or in /etc/security/limits.conf)"
        )


def too_many_open_files(error: OSError) -> DistflowError | None:
    """Returns the error to raise instead if the limit of open files is reached."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    whose = "this worker's limit" if error.errno == errno.EMFILE else "the system's limit (fs.file-max)"
    return DistflowError(
        f"too many open files: {whose} of {limit} is reached and connections need more;"
        " raise it with `ulimit -n` (as root, or in /etc/security/limits.conf), or start fewer workers on this host"
    )
