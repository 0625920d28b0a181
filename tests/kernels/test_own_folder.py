"""Code is loaded from folders that nobody else can write to: what another user planted is not, wherever it lies."""

from __future__ import annotations

import ctypes
import os
import subprocess
import warnings
from pathlib import Path

import pytest

from phalanx.kernels import own_folder
from phalanx.kernels.compiled import built
from phalanx.kernels.own_folder import keep_to_own, others_in

OTHER = 4242
root_alone = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder._warn.cache_clear()
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir(0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return SEVEN; }\n")
    return path


def shared(folder: Path, mode: int, owner: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    if os.geteuid() == 0:
        os.chown(folder, owner, owner)
    return folder


def test_folders_that_are_this_users_alone(tmp_path: Path) -> None:
    assert others_in(shared(tmp_path / "own", 0o755)) == ""
    assert others_in(shared(tmp_path / "sticky", 0o1777) / "nothing") != ""
    assert others_in(shared(tmp_path / "sticky" / "own", 0o700)) == "", "as in /tmp"
    assert "can be written to by others (mode 1777)" in others_in(tmp_path / "sticky"), "who could be there first"
    assert "can be written to by others (mode 777)" in others_in(shared(tmp_path / "open", 0o777))
    assert "open can be written to by others" in others_in(shared(tmp_path / "open" / "own", 0o700))
    (tmp_path / "link").symlink_to(tmp_path / "open" / "own")
    assert "open can be written to by others" in others_in(tmp_path / "link")
    (tmp_path / "own" / "file").touch(0o600)
    assert others_in(tmp_path / "own" / "file") == ""
    (tmp_path / "own" / "file").chmod(0o666)
    assert others_in(tmp_path / "own" / "file") != ""


@root_alone
def test_folders_of_another_user(tmp_path: Path) -> None:
    assert "belongs to another user (number 4242)" in others_in(shared(tmp_path / "theirs", 0o755, OTHER))
    assert "theirs belongs to another user" in others_in(shared(tmp_path / "theirs" / "own", 0o700))
    (tmp_path / "own").mkdir()
    shared(tmp_path / "own" / "grouped", 0o775)
    os.chown(tmp_path / "own" / "grouped", 0, OTHER)
    assert "can be written to by others (mode 775)" in others_in(tmp_path / "own" / "grouped")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_code_in_a_folder_that_others_write_to_is_not_loaded(
    mode: int, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(shared(tmp_path / "shared", mode)))
    honest = built(source, ["-DSEVEN=7"]) if mode == 0o1777 else None
    name = "phalanx_seven_" + _told(tmp_path, source)
    planted = shared(tmp_path / "shared" / name, 0o755, OTHER) / "whole.so"
    if honest is None or os.geteuid() == 0:
        evil = tmp_path / "evil.c"
        evil.write_text("int seven(void) { return 666; }\n")
        planted.unlink(missing_ok=True)
        subprocess.run(["cc", "-shared", "-fPIC", str(evil), "-o", str(planted)], check=True)
        with pytest.warns(
            UserWarning, match=r"compiled code is kept in .*home/\.cache/phalanx/compiled: .*who could plant"
        ):
            found = built(source, ["-DSEVEN=7"])
        assert found.is_relative_to(tmp_path / "home")
        assert ctypes.CDLL(str(found)).seven() == 7
        assert found.parent.stat().st_mode & 0o777 == 0o700
        assert built(source, ["-DSEVEN=7"]) == found


def _told(tmp_path: Path, source: Path) -> str:
    """By what the folder of this source is called."""
    before = os.environ["TORCH_EXTENSIONS_DIR"]
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "named")
    try:
        return built(source, ["-DSEVEN=7"]).parent.name.removeprefix("phalanx_seven_")
    finally:
        os.environ["TORCH_EXTENSIONS_DIR"] = before


@root_alone
def test_a_file_of_another_user_in_ones_own_folder_is_made_anew(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))
    found = built(source, ["-DSEVEN=7"])
    found.write_bytes(b"planted when this folder was open to others")
    os.chown(found, OTHER, OTHER)
    assert ctypes.CDLL(str(built(source, ["-DSEVEN=7"]))).seven() == 7


@root_alone
def test_where_no_folder_is_ones_own_nothing_is_loaded(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shared", "home", "tmp"):
        shared(tmp_path / name, 0o777)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "shared"))
    with pytest.raises(
        RuntimeError, match=r"no folder for it is this user's alone: .*shared can be written to by others"
    ):
        built(source, ["-DSEVEN=7"])


def test_compilers_of_others_are_led_to_ones_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONE_CACHE", raising=False)
    own = str(tmp_path / "tmp" / "usual")
    keep_to_own({"ONE_CACHE": own})
    assert "ONE_CACHE" not in os.environ
    assert os.stat(own).st_mode & 0o777 == 0o700, "made, before somebody else can"
    monkeypatch.setenv("ONE_CACHE", str(shared(tmp_path / "open", 0o777) / "cache"))
    with pytest.warns(UserWarning, match="who could plant code there"):
        keep_to_own({"ONE_CACHE": own})
    assert os.environ["ONE_CACHE"] == str(tmp_path / "home" / ".cache" / "phalanx" / "compiled" / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    monkeypatch.setenv("ONE_CACHE", str(tmp_path / "link" / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_to_own({"ONE_CACHE": own})
    assert os.environ["ONE_CACHE"] == str(tmp_path / "home" / "cache")
