"""Measures how much a program has written, for machines where it cannot have a file system of its own."""

import contextlib
import os
import stat

MAX_INODES = 4096  # files and folders a program may create


def count_files(folder: str, max_bytes: int, pid: int) -> int:
    """Returns how many files and folders a program has made; -1 if they are more than it may make, or have more bytes,
    also in files that it has removed and still uses."""
    size, count = _unlinked_bytes(folder, pid), 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if size > max_bytes or count > MAX_INODES:
                        return -1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue  # the program removed it meanwhile
        except OSError:
            return -1  # nested so deep that its path is too long
    return -1 if size > max_bytes else count


def _unlinked_bytes(folder: str, pid: int) -> int:
    """Returns the size of the files that no folder has any more, but the program has open or mapped."""
    device, sizes = os.stat(folder).st_dev, dict[int, int]()
    with contextlib.suppress(OSError):  # it has ended, or its files cannot be seen
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                file = os.stat(f"/proc/{pid}/fd/{fd}")
                if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_dev == device:
                    sizes[file.st_ino] = file.st_blocks * 512
        mapped = dict[int, int]()
        with open(f"/proc/{pid}/maps", errors="replace") as lines:
            for line in lines:
                if line.endswith(" (deleted)\n") and folder in line:
                    addresses, _, _, _, inode, _ = line.split(maxsplit=5)
                    start, end = addresses.split("-")
                    mapped[int(inode)] = mapped.get(int(inode), 0) + int(end, 16) - int(start, 16)
        sizes = mapped | sizes
    return sum(sizes.values())
