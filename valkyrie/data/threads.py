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
    """Yield `function(item)` for every item, in order. `workers` threads compute up to `ahead` results in advance."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="valkyrie-data")
    futures: deque[Future[Output]] = deque()
    try:
        for item in items:
            futures.append(pool.submit(function, item))
            if len(futures) > ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
