"""What every test runs under: a fork server, the pool of ranks, and a check that nothing is left behind.

This process runs autograd, so whatever trains in another process is forked by the server (`tests.forking`).
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

from phalanx import redact
from phalanx.launch import forkserver
from phalanx.parallel.communication.compiled_notes import compiled
from phalanx.parallel.torch_private import preload
from tests import cuda_rule
from tests.quick import left_out
from tests.ranks import Ranks

torch.set_num_threads(1)  # this process is forked from, and OpenMP's threads do not survive that
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks of each worker: they share the cores
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers would outlive the test that compiles first
preload()  # torch sets an environment variable when it first imports its compiler
cuda_rule.apply()
hypothesis.settings.register_profile(
    "any machine", suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None
)
hypothesis.settings.load_profile("any machine")  # a test says what is right, not how fast a busy machine is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")
    parser.addoption("--gpu", action="store_true", help="the tests that need a GPU, and no others")
    parser.addoption("--every", action="store_true", help="the exhaustive tests too, and all layouts of 4 and 8 ranks")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every: an exhaustive test, run by `make test-every` alone")
    config.addinivalue_line("markers", "gpu: a test that needs a GPU, run by `pytest --gpu` alone")
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the others compute on the CPU, whatever is here


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, gpu = config.getoption("--every"), config.getoption("--gpu")
    left = set() if every or gpu or _by_name(config) else set(left_out(items))
    chosen = {
        item for item in items
        if bool(item.get_closest_marker("gpu")) == gpu and (every or not item.get_closest_marker("every"))
    } - left  # fmt: skip
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _by_name(config: pytest.Config) -> bool:
    """Whether somebody asks for certain tests, and is to get all of them."""
    named = [word for word in config.args if word.partition("::")[0].endswith(".py")]
    return bool(named or config.getoption("keyword"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """All test files are imported, and nothing has computed yet."""
    with suppress(RuntimeError):  # there is no compiler
        compiled(seconds=60)  # so that no test waits for it, nor leaves it behind
    forkserver.kept(forkserver.ForkServer())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (server := forkserver.kept()) is not None:
        server.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session")
def _pool() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool: Ranks) -> Ranks:
    return _pool


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with a ``disk`` in it that holds a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield tmp_path
    subprocess.run(["umount", disk], check=True)


TORCHS_THREADS = "tqdm_monitor", "Dummy-"
"""Of the bar that torch's compiler may draw, and those of autograd that called Python: it never ends them."""


SET_ONCE = ("PYTEST_CURRENT_TEST", "_TORCHINDUCTOR", "TRITON_", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
"""Variables, by how they begin: those that pytest, torch's compiler and an optional package set for a process."""


def variables() -> dict[str, str]:
    """Of the environment, but for those."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SET_ONCE)}


def children() -> set[int]:
    """This process's children, and theirs."""
    found, parents = set(), {os.getpid()}
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            stats.append((int(path.parent.name), int(fields[1])))
    while parents:
        found |= (parents := {pid for pid, parent in stats if parent in parents} - found)
    return found


@pytest.fixture(autouse=True)
def no_secret_known() -> Iterator[None]:
    """A secret of one test's is none of another's."""
    yield
    redact.forget()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a process, a thread, a process group or an environment variable."""
    pool = request.getfixturevalue("ranks") if "ranks" in request.fixturenames else None
    before = variables()
    threads, processes = set(threading.enumerate()), children()
    yield
    assert not dist.is_initialized(), "the test left a process group behind"
    renewed = {process.pid for process in pool.processes} if isinstance(pool, Ranks) else set()  # after a failure
    assert children() <= processes | renewed, "the test left a process behind"
    threads |= {pool.store.thread} if isinstance(pool, Ranks) else set()
    left = {thread for thread in set(threading.enumerate()) - threads if not thread.name.startswith(TORCHS_THREADS)}
    for thread in left:
        thread.join(timeout=5)  # a queue's feeder ends a moment after the queue is closed
    left = {thread for thread in left if thread.is_alive()}
    assert not left, f"the test left threads behind: {left}"
    assert variables() == before, "the test changed the environment"
