"""What is installed."""

from importlib.metadata import PackageNotFoundError, version


def package_version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # used from its source folder
        return "unknown"
