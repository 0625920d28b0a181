"""Hosts that see the same folder and hosts that do not, each with a seat of its own at a real rendezvous."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import CannotHere
from phalanx.checkpoint.store import Folder, open_store
from phalanx.launch import network, shared
from phalanx.launch.key import Key
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.rounds import Round
from phalanx.launch.shared import Shared


@pytest.fixture
def seats() -> Iterator[list[tuple[Rendezvous, Round]]]:
    """Hosts a and b, who have met."""
    with network.listen_alone() as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    key = Key()
    several = [Rendezvous(address, key=key, name="run", ranks=1, min_nodes=2, max_nodes=2, host=host) for host in "ab"]
    found: dict[str, Round] = {}

    def meet(rendezvous: Rendezvous) -> None:
        met = rendezvous.next()
        assert met is not None
        found[rendezvous.host] = met

    threads = [threading.Thread(target=meet, args=(rendezvous,)) for rendezvous in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    yield sorted(((rendezvous, found[rendezvous.host]) for rendezvous in several), key=lambda seat: seat[1].node)
    for _, met in found.items():
        if met.listening is not None:
            met.listening.close()
    for rendezvous in several:
        rendezvous.close()


def never() -> bool:
    return False


def test_who_does_not_see_the_checkpoints_is_refused_and_all_know_why(
    seats: list[tuple[Rendezvous, Round]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PATIENCE_SECONDS", 0.3)
    (first, met), (second, also_met) = seats
    one = Shared(first, Folder(tmp_path), Folder(tmp_path / "one"))
    one.check(met, never)
    other = Shared(second, Folder(tmp_path), Folder(tmp_path / "other"))
    with pytest.raises(CannotHere, match=f"host {second.host} does not see what host {first.host} writes to .*other"):
        other.check(also_met, never)
    while not one.unshared():
        assert first.changed() is None
    assert one.unshared() == other.unshared()
    one.close()
    assert not list((tmp_path / "one").iterdir())


def test_folders_and_stores_that_all_see(seats: list[tuple[Rendezvous, Round]], tmp_path: Path) -> None:
    (first, met), (second, also_met) = seats
    store = open_store("memory://shared-by-this-process")
    (tmp_path / f"{shared.MARK}left").mkdir()
    for rendezvous, seen in ((first, met), (second, also_met)):
        both = Shared(rendezvous, Folder(tmp_path), store)
        both.check(seen, never)
        assert not both.private
        if rendezvous is first:
            kept = both
    assert len(store.names()) == len(list(tmp_path.iterdir())) == 1
    kept.close()
    assert not store.names()
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_without_its_first_host_only_where_its_folder_is(
    seats: list[tuple[Rendezvous, Round]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(shared, "PATIENCE_SECONDS", 0.3)
    (first, met), (second, also_met) = seats
    for name in "one", "other":
        (tmp_path / name).mkdir()
    checkpoints = Folder(tmp_path / "kept")
    Shared(first, Folder(tmp_path / "one"), checkpoints).check(met, never)
    other = Shared(second, Folder(tmp_path / "other"), checkpoints)
    other.check(also_met, never)
    assert other.private == first.host
    assert "is not shared: the run's events, weights and certificate are in that folder" in capsys.readouterr().err
    with pytest.raises(CannotHere, match=f"host {first.host} was lost, and what it wrote to .*other with it"):
        other.check(met, never)


def test_a_folder_that_cannot_be_written_to(seats: list[tuple[Rendezvous, Round]], tmp_path: Path) -> None:
    (first, met), _ = seats
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotHere, match=r"cannot write to .*file: (Not a directory|File exists)"):
        Shared(first, Folder(tmp_path), Folder(tmp_path / "file")).check(met, never)
