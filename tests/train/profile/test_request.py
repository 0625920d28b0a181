"""What --profile asks for: read from its words, held against the job, or refused with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import WrongUse
from phalanx.train.options import Options
from phalanx.train.profile.request import ProfileRequest
from tests.test_cli import GOOD, phalanx


@pytest.mark.parametrize(
    ("text", "first", "last", "ranks"),
    [
        ("10:12", 10, 12, [0, 1, 2, 3]),
        ("10:12@0,3", 10, 12, [0, 3]),
        ("10:12@0-1,3", 10, 12, [0, 1, 3]),
        ("10:12@all", 10, 12, [0, 1, 2, 3]),
        ("7", 7, 7, [0, 1, 2, 3]),
        ("modules", 3, 3, [0, 1, 2, 3]),
        ("modules@5", 5, 5, [0, 1, 2, 3]),
    ],
)
def test_words_are_read(text: str, first: int, last: int, ranks: list[int]) -> None:
    request = ProfileRequest.parse(text)
    assert (request.first, request.last) == (first, last)
    assert request.chosen([0, 0, 1, 1]) == ranks
    request.check(world=4, steps=12)


def test_of_many_ranks_the_first_of_each_host_is_profiled() -> None:
    hosts = [host for host in range(12) for _ in range(8)]
    assert ProfileRequest.parse("1:2").chosen(hosts) == [0, 8, 16, 24, 32, 40, 48, 56]
    assert len(ProfileRequest.parse("1:2@all").chosen(hosts)) == 96


def test_ranks_that_are_not_there_any_more_are_left_out() -> None:
    assert ProfileRequest.parse("1:2@0,3").chosen([0, 0]) == [0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("12:10", "ends before it begins. Give the first step first: 10:12."),
        ("a:b", "is not two numbers. Write it like --profile 10:12"),
        ("3:", "is not two numbers"),
        ("", "is not two numbers"),
        ("0:3", "steps count from 1. Begin with 1 or more."),
        ("3:4@", "names nothing. Write it like"),
        ("3:4@1-0", "names no ranks with '1-0'"),
        ("3:4@0,,1", "names no ranks with ''"),
        ("1:500", "asks for 500 steps"),
        ("modules@x", "names no step after the @"),
        ("modules@1", "Give a step from 2 on"),
        ("nvtx@3", "Write it like"),
        ("²:3", "is not two numbers"),
    ],
)
def test_what_means_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(WrongUse) as refused:
        Options(profile=text)
    assert told in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("5:6@9", "names rank 9, and there are ranks 0 to 3. Name some of these, or @all."),
        ("5:9", "is beyond the end: the last is step 6. Give steps up to that, or more --steps."),
        ("modules@7", "is beyond the end"),
    ],
)
def test_what_the_job_does_not_have_is_refused(text: str, told: str) -> None:
    with pytest.raises(WrongUse) as refused:
        ProfileRequest.parse(text).check(world=4, steps=6)
    assert told in str(refused.value)


def test_ranges_for_nsight_need_a_gpu() -> None:
    ProfileRequest.parse("nvtx").check_device("cuda")
    with pytest.raises(WrongUse) as refused:
        ProfileRequest.parse("nvtx").check_device("cpu")
    assert "no GPU here" in str(refused.value)


def test_nothing_is_started_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    for text in ("4:9", "2:3@2"):
        done = phalanx("train", "mine.py", "--on", "local:2", "--profile", text, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"phalanx: --profile {text} ")
        assert not (tmp_path / "runs").exists()


def test_a_profile_is_not_repeated_with_the_run() -> None:
    assert "profile" not in Options(profile="1:2").to_repeat()
