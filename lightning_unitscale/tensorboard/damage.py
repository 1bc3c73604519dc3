"""Find event files that TensorBoard does not read to their end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboard.util import tb_logging


@contextmanager
def collect_damaged_files() -> Iterator[list[str]]:
    """Collect the names of damaged event files that TensorBoard reads in this context.

    It ends such a file silently at the damage, as it ends that of a running training, whose last
    record is incomplete. Only its log at the level DEBUG has the reason.
    """
    damaged: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Truncated record in") and isinstance(record.args, tuple):
            path, reason = map(str, record.args)
            if "truncated" not in reason:
                damaged.append(Path(path).name)
        return False  # print nothing

    logger = tb_logging.get_logger()
    level = logger.level
    logger.addFilter(collect)
    logger.setLevel(logging.DEBUG)
    try:
        yield damaged
    finally:
        logger.setLevel(level)
        logger.removeFilter(collect)
