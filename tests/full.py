"""Disks that are full, for tests."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Mounts a file system of its own there; raises PermissionError where only root may."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise PermissionError("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond a size: as on a full disk, the last write takes only a part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(folder: Path) -> Path:
    """Takes all the room that a disk has; removing the file gives it back."""
    filler = folder / "filler"
    with suppress(OSError), open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    return filler
