"""An ordered map in threads that computes results in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")


def map_ahead(
    function: Callable[[Item], Output], items: Iterable[Item], *, workers: int, ahead: int
) -> Iterator[Output]:
    """Yield `function(item)` of every item in order. `workers` threads compute up to `ahead` results in advance."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="valkyrie-data")
    waiting: deque[Future[Output]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
