"""Compiling and keeping the kernels, with a small library in their place: no damaged or foreign one is loaded."""

import logging
import os
import select
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from wsbatch.model import compiled, kernel_cache
from wsbatch.model.compiled import KernelsUnavailable, load_library
from wsbatch.model.kernel_cache import KernelCache
from wsbatch.model.levels import choose

GENERIC = choose("generic")  # every processor has it
SOURCE = """
extern "C" {
int wsbatch_create() { return 7; }
void wsbatch_step() {}
void wsbatch_choose() {}
void wsbatch_destroy() {}
const char padding[20000] = {1};
}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's directory, not made yet; the kernels are SOURCE."""
    if compiled.shutil.which("g++") is None or compiled.sys.platform != "linux":
        pytest.skip("no g++ on Linux")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "step.cpp").write_text(SOURCE)
    monkeypatch.setattr(compiled, "_SOURCES", sources)
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "g++")
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that compile."""
    commands: list[list[str]] = []
    run = compiled._run

    def counted(command: list[str]) -> str:
        if "--version" not in command:
            commands.append(command)
        return run(command)

    monkeypatch.setattr(compiled, "_run", counted)
    return commands


def works() -> None:
    assert load_library(torch.float32, GENERIC).wsbatch_create() == 7


def test_a_second_start_loads_what_the_first_compiled(place: Path, compilations: list[list[str]]) -> None:
    works()
    works()
    assert len(compilations) == 1
    (kept,) = place.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut short": lambda whole: whole[: len(whole) // 2],
    "zeroed in its middle": lambda whole: whole[:4096] + bytes(len(whole) - 8192) + whole[-4096:],
    "another build": lambda whole: whole.replace(b"wsbatch_create", b"wsbatch_kreate"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_compiled_anew(place: Path, compilations: list[list[str]], damage: str) -> None:
    works()
    (kept,) = place.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # the process has mapped it: damage another file
    kept.write_bytes(DAMAGE[damage](whole))
    works()
    assert len(compilations) == 2
    assert kept.read_bytes() == whole, "the next start finds a sound one"


@settings(max_examples=100)
@given(st.data())
def test_no_change_of_a_byte_or_of_the_length_is_taken_for_sound(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("kernels")
    cache = KernelCache(directory)
    content = data.draw(st.binary(min_size=1, max_size=200))
    (directory / "made").write_bytes(content)
    kept = cache.keep(directory / "made", "key")
    assert list(cache.find("key")) == [kept]
    assert list(cache.find("other")) == []
    at = data.draw(st.integers(0, len(content) - 1))
    changed = data.draw(
        st.sampled_from(
            [content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content + content[: at + 1]]
        )
    )
    kept.write_bytes(changed)
    assert list(cache.find("key")) == []


def test_a_library_of_other_symbols_is_not_taken(place: Path, compilations: list[list[str]]) -> None:
    works()
    (kept,) = place.iterdir()
    key = kept.name.split("-")[1]
    other = kept.read_bytes().replace(b"wsbatch_create", b"wsbatch_kreate")
    kept.unlink()
    (place / "made").write_bytes(other)
    KernelCache(place).keep(place / "made", key)  # under its own digest
    works()
    assert len(compilations) == 2


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_directory_that_others_can_write_is_not_used(
    place: Path, compilations: list[list[str]], caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    works()
    place.chmod(mode)
    with caplog.at_level(logging.WARNING, "wsbatch.model"):
        works()
    assert len(compilations) == 2
    assert f"{place} can be written by others" in caplog.text


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_library_that_others_can_write_is_not_loaded(
    place: Path, compilations: list[list[str]], caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    works()
    (kept,) = place.iterdir()
    kept.chmod(mode)
    with caplog.at_level(logging.WARNING, "wsbatch.model"):
        works()
    assert len(compilations) == 2
    assert f"{kept} can be written by others" in caplog.text


def test_only_our_own_and_roots_libraries_are_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works()
    (kept,) = place.iterdir()
    key = kept.name.split("-")[1]
    root = os.geteuid() == 0
    if root:
        os.chown(kept, 1234, -1)
        os.chown(place, 1234, -1)
    owner = kept.stat().st_uid
    monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: owner)
    cache = KernelCache(place)
    assert list(cache.find(key)) == [kept]
    monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: owner + 1)
    assert list(cache.find(key)) == []
    assert f"belongs to user {owner}, neither this one nor root" in caplog.text
    with pytest.raises(PermissionError, match="neither this one nor root"):
        KernelCache(place)
    if root:
        os.chown(kept, 0, -1)
        assert list(cache.find(key)) == [kept]


def test_a_cache_of_wide_umask_is_safe_from_the_start(place: Path, compilations: list[list[str]]) -> None:
    before = os.umask(0)
    try:
        works()
    finally:
        os.umask(before)
    works()
    assert len(compilations) == 1


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("obstacle", ["no home", "a file in its place", "no room"])
def test_without_a_cache_they_are_compiled_at_each_start(
    place: Path, compilations: list[list[str]], monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    if obstacle == "no home":
        monkeypatch.setattr(compiled, "cache_dir", no_home)
    elif obstacle == "a file in its place":
        place.parent.write_text("")
    else:

        def full(made: Path, key: str) -> Path:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(KernelCache, "keep", lambda self, made, key: full(made, key))
    works()
    works()
    assert len(compilations) == 2


def test_a_library_that_cannot_be_kept_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_cache.os, "fsync", full)
    works()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("cxx", ["g++ -O2", "  g++   '-DNAME=\"a b\"'", "", "no-such-compiler", "no-such-compiler -O2"])
def test_the_compiler_may_have_flags_and_may_be_missing(
    place: Path, compilations: list[list[str]], monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    works()
    assert compilations[0][0] == "g++"
    if "DNAME" in cxx:
        assert compilations[0][1] == '-DNAME="a b"'


def script(path: Path, body: str) -> str:
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{body}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo no such flag >&2; exit 1", "no such flag"),
        (r"printf '\377\376' >&2; exit 1", "failed: \ufffd\ufffd"),
        ("exit 0", "No such file"),  # it writes nothing
        ("kill -SEGV $$", "failed"),
    ],
)
def test_a_compiler_that_fails_is_told_and_leaves_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "c++", body))
    with pytest.raises(KernelsUnavailable, match=reason):
        load_library(torch.float32, GENERIC)
    assert list(place.iterdir()) == []


def test_a_malformed_compiler_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'half")
    with pytest.raises(KernelsUnavailable, match=r"CXX=.* cannot be read"):
        load_library(torch.float32, GENERIC)


def test_a_compiler_that_hangs_is_ended_with_its_children(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    # Its child holds the pipe open for as long as it lives.
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f"(echo started; exec sleep 1000) > {alive} & wait"))

    class Hanging(subprocess.Popen[str]):
        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            if "--version" in self.args:  # type: ignore[operator]
                return super().communicate(input, timeout)
            assert select.select([reader], [], [], 60)[0]
            assert os.read(reader, 100) == b"started\n"
            raise subprocess.TimeoutExpired(self.args, 300)

    monkeypatch.setattr(compiled.subprocess, "Popen", Hanging)
    try:
        with pytest.raises(KernelsUnavailable, match="timed out after 300"):
            load_library(torch.float32, GENERIC)
        assert select.select([reader], [], [], 60)[0], "the child lives on"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
    assert list(place.iterdir()) == []
