import os
import time

import pytest
import torch

from alchemi_shardtensor import RankPool, comm_from_environment
from alchemi_spec import RankFailure


def rank_times(comm, factor):
    return comm.rank * factor


def fail_on(comm, rank):
    if comm.rank == rank:
        raise ZeroDivisionError("one rank only")
    comm.all_reduce(torch.zeros(1))


def die_on(comm, rank):
    if comm.rank == rank:
        os._exit(7)
    comm.all_reduce(torch.zeros(1))


def miss_a_collective(comm):
    if comm.rank:
        comm.all_reduce(torch.zeros(1))


def count(comm, n):
    for i in range(n):
        yield comm.all_reduce(torch.tensor(i)).item()


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as pool:
        yield pool


def test_results_come_in_the_order_of_ranks(pool):
    assert pool.run(rank_times, 5) == [0, 5, 10]
    assert pool.run(rank_times, 5, ranks=2) == [0, 5]


def test_items_are_streamed_from_rank_0(pool):
    assert list(pool.stream(count, 3)) == [0, 3, 6]


def test_a_failing_rank_stops_the_others_and_the_pool_starts_again(pool):
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="one rank only") as caught:
        pool.run(fail_on, 1)
    assert time.monotonic() - began < 20
    assert "on rank 1 of 3" in caught.value.__notes__[0]
    assert pool.run(rank_times, 1) == [0, 1, 2]


def test_a_dead_rank_is_named_with_its_exit_code(pool):
    with pytest.raises(RankFailure, match="rank 2 of 3 died with exit code 7"):
        pool.run(die_on, 2)


def test_a_rank_that_never_answers_is_named(pool):
    pool.run(rank_times, 1)
    with pytest.raises(RankFailure, match="no answer from rank 1, 2 of 3 within 1 s"):
        pool.run(miss_a_collective, timeout=1)


def test_nonsense_is_refused(pool):
    with pytest.raises(ValueError, match="at least one rank"):
        RankPool(0)
    with pytest.raises(ValueError, match="3 ranks, not 4"):
        pool.run(rank_times, 1, ranks=4)


def test_the_variables_of_torchrun_give_the_same_comm(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    comm = comm_from_environment()
    assert (comm.rank, comm.size) == (0, 1) and comm.all_reduce(torch.ones(1)).item() == 1
    torch.distributed.destroy_process_group()


def test_without_torchrun_there_is_a_world_of_one():
    comm = comm_from_environment()
    assert (comm.rank, comm.size, comm.group) == (0, 1, None)


def test_a_pool_does_one_thing_at_a_time(pool):
    stream = pool.stream(count, 3)
    next(stream)
    with pytest.raises(RuntimeError, match="still streaming"):
        pool.run(rank_times, 1)
    stream.close()
    assert pool.run(rank_times, 1) == [0, 1, 2]
