"""A pool of ranks goes on after a rank has failed or died."""

from __future__ import annotations

import os
import pickle
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.launch.pool import Pool
from tests.forking import server


def add(values: list[int]) -> int:
    total = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_jobs_follow_each_other_and_failures_are_told() -> None:
    pool = Pool(server(), 3, timedelta(seconds=20))
    try:
        assert [answer.value for answer in pool.ask(3, add, [1, 2, 3])] == [6, 6, 6]
        answers = pool.ask(2, fail_on_one)
        assert [answer.failed for answer in answers] == [False, True]
        assert isinstance(answers[1].error, ValueError)
        assert "fail_on_one" in answers[1].trace
        assert pool.ask(2, die_on_one)[1].gone
        assert [answer.value for answer in pool.ask(2, add, [1, 2])] == [3, 3]
        assert pool.ask(1, os.getpid)[0].value == pool.processes[0].pid
    finally:
        pool.close()


def test_an_error_that_does_not_travel_is_told_in_words() -> None:
    pool = Pool(server(), 1, timedelta(seconds=20))
    try:
        answer = pool.ask(1, _raise_strange)[0]
        assert "Strange" in str(answer.error)
    finally:
        pool.close()


class Strange(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("only one")


def _raise_strange() -> None:
    raise Strange(1, 2)


def test_ranks_are_told_who_they_are_and_none_is_left() -> None:
    pool = Pool(server(), 2, timedelta(seconds=20))
    pids = [process.pid for process in pool.processes]
    assert [answer.value for answer in pool.ask(2, os.getenv, "RANK")] == ["0", "1"]
    assert pool.ask(1, os.getenv, "RANK")[0].value is None
    os.kill(pids[1] or 0, signal.SIGKILL)
    pool.processes[1].join()
    assert pool.ask(2, add, [1, 2])[1].gone
    pids += [process.pid for process in pool.processes]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


def test_a_rank_whose_pool_is_closed_while_it_works_ends_quietly() -> None:
    pool = Pool(server(), 1, timedelta(seconds=20))
    pool.pipes[0].send_bytes(pickle.dumps((1, 1, pool.server.dumps((time.sleep, (0.3,))))))
    pool.pipes[0].close()
    pool.processes[0].join(20)
    assert pool.processes[0].exitcode == 0  # 1 after a traceback
    pool.close()
