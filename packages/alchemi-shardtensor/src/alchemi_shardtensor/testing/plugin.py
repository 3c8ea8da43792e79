"""The pytest plugin: one pool of ranks for the whole session."""

from collections.abc import Callable, Iterator

import pytest

from alchemi_shardtensor.launch import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """The session's pool, grown to at least the asked number of ranks."""
    pools = [RankPool(4, preload=["alchemi_shardtensor.testing"])]

    def at_least(size: int) -> RankPool:
        if pools[0].size < size:
            pools[0].close()
            pools[0] = RankPool(size)
        return pools[0]

    yield at_least
    pools[0].close()
