"""The pytest plugin: one pool of ranks for the whole session."""

from collections.abc import Callable, Iterator

import pytest

from alchemi_shardtensor.transport import RankPool


@pytest.fixture(scope="session")
def rank_preload() -> list[str]:
    """Modules that ranks import once, before they are forked; override it in a conftest with what your tests import."""
    return []


@pytest.fixture(scope="session")
def rank_pool(rank_preload: list[str]) -> Iterator[Callable[[int], RankPool]]:
    """The session's pool, grown to at least the asked number of ranks."""
    preload = ["alchemi_shardtensor.testing", *rank_preload]
    pools = [RankPool(4, preload=preload)]

    def at_least(size: int) -> RankPool:
        if pools[0].size < size:
            pools[0].close()
            pools[0] = RankPool(size, preload=preload)
        return pools[0]

    yield at_least
    pools[0].close()
