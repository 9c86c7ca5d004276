"""Several async generators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the source, item) of all `sources`, which are async generators, as they come. What one raises ends all;
    closing this one closes them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:  # type: ignore[type-var]
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def forward(index: int, items: AsyncIterator[T]) -> None:
        async with aclosing(items) as source:  # type: ignore[type-var]
            async for item in source:
                queue.put_nowait((index, item))

    tasks = [asyncio.create_task(forward(index, source)) for index, source in enumerate(sources)]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        for _ in tasks:
            while (entry := await queue.get()) is not None:
                yield entry
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
