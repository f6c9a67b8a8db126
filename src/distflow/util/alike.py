"""Messages that all workers of a run would log alike. Imports no torch."""

import logging
import sys


def warn_alike(logger: logging.Logger, message: str, *args: object) -> None:
    """Warns on rank 0 of a run, and anywhere outside of one; only for what every rank finds at the same moment."""
    distributed = sys.modules.get("torch.distributed")
    if not (distributed and distributed.is_initialized() and distributed.get_rank()):
        logger.warning(message, *args)
