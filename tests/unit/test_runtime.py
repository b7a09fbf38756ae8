"""Where agents put their sockets: a directory of this user alone, found again by whoever asks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elastic import runtime
from elastic.errors import UsageError


def test_the_directory_that_systemd_names_comes_first(tmp_path: Path) -> None:
    environ = {"RUNTIME_DIRECTORY": f"{tmp_path}/one:{tmp_path}/two", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime.runtime_dir(environ) == tmp_path / "one"


def test_a_session_has_its_directory_for_this_user_alone(tmp_path: Path) -> None:
    directory = runtime.runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert directory == tmp_path / "elasticd"
    assert directory.stat().st_mode & 0o777 == 0o700


def test_without_any_of_them_there_is_still_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_SYSTEM_DIRECTORY", tmp_path / "system")
    directory = runtime.runtime_dir({"XDG_RUNTIME_DIR": "/does/not/exist"})
    assert directory == (tmp_path / "system" if os.geteuid() == 0 else Path(f"/tmp/elasticd-{os.geteuid()}"))
    assert directory.stat().st_uid == os.geteuid()


def test_a_directory_that_others_may_write_to_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(UsageError, match=r"open: others may write there \(mode 1777; 700 is wanted\)"):
        runtime.runtime_dir({"RUNTIME_DIRECTORY": str(tmp_path / "open")})
    assert (tmp_path / "open").stat().st_mode & 0o7777 == 0o1777


def test_what_is_made_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o777)
    try:
        made = runtime.runtime_dir({"RUNTIME_DIRECTORY": str(tmp_path / "new")})
    finally:
        os.umask(umask)
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_link_or_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UsageError, match=rf"{name}: is not a directory.*set RUNTIME_DIRECTORY"):
            runtime.runtime_dir({"RUNTIME_DIRECTORY": str(tmp_path / name)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused_and_not_searched(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "1.sock").touch()
    os.chown(theirs, 12345, 12345)
    environ = {"RUNTIME_DIRECTORY": str(theirs)}
    with pytest.raises(UsageError, match="belongs to uid 12345"):
        runtime.runtime_dir(environ)
    assert theirs / "1.sock" not in runtime.sockets(environ)


def test_sockets_are_found_in_the_directory_and_in_those_of_single_jobs(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    for name in ("1.sock", "job/2.sock", "other"):
        (tmp_path / name).touch()
    tmp_path.chmod(0o700)
    found = runtime.sockets({"RUNTIME_DIRECTORY": str(tmp_path)})
    assert {tmp_path / "1.sock", tmp_path / "job/2.sock"} <= set(found)
    assert tmp_path / "other" not in found


def test_a_service_is_found_without_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_SYSTEM_DIRECTORY", tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "1.sock").touch()
    assert tmp_path / "1.sock" in runtime.sockets({"XDG_RUNTIME_DIR": "/does/not/exist"})
    assert runtime.sockets({"RUNTIME_DIRECTORY": "/does/not/exist"}) == []


@pytest.mark.parametrize("length", [10, 200])
def test_a_socket_works_however_long_its_path_is(tmp_path: Path, length: int) -> None:
    directory = tmp_path / ("d" * length)
    directory.mkdir()
    path = runtime.socket_path(directory, 4194304)
    with socket.socket(socket.AF_UNIX) as listening:
        with runtime.socket_address(path) as address:
            listening.bind(address)
        listening.listen()
        assert path.is_socket()
        runtime.connect(path, 1.0).close()
    with pytest.raises(ConnectionRefusedError):
        runtime.connect(path, 1.0)
