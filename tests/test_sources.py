"""Inputs: what they are, how they are read, and what is said of those that can't be."""

import bz2
import gzip
import lzma
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from memledger.sources import BLOCK_BYTES, InputError, OpenInput, open_input
from memledger.sources.follow import arriving, growing

LINES = "".join(f"[2026-05-01 22:44:{n % 60:02d} TP{n % 4}] line {n} costs é {n * 7}\n" for n in range(45_000)).encode()

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bzip2": bz2.compress,
}


def read(path: Path | str) -> tuple[bytes, OpenInput]:
    with open_input(str(path)) as source:
        return b"".join(source.blocks()), source


def put(folder: Path, data: bytes, name: str = "server.log") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# ---- plain files


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    data, source = read(put(tmp_path, LINES))
    assert data == LINES
    assert (source.kind, source.notes, source.size) == ("text", [], len(LINES))
    assert source.head == LINES[: 64 * 1024]


def test_progress_is_told_in_bytes_of_the_file(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    path = put(tmp_path, gzip.compress(LINES))
    with open_input(str(path), progress=lambda done, size: told.append((done, size))) as source:
        for _ in source.blocks():
            pass
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_an_empty_file(tmp_path: Path) -> None:
    data, source = read(put(tmp_path, b""))
    assert (data, source.kind, source.notes) == (b"", "empty", [])


# ---- compressed, by content and not by name


@pytest.mark.parametrize("how", COMPRESS)
def test_compressed_files_are_told_by_their_first_bytes(tmp_path: Path, how: str) -> None:
    data, source = read(put(tmp_path, COMPRESS[how](LINES), "server.txt"))
    assert (data, source.notes) == (LINES, [])


@pytest.mark.parametrize("how", COMPRESS)
def test_archives_appended_to_each_other(tmp_path: Path, how: str) -> None:
    data, source = read(put(tmp_path, COMPRESS[how](LINES) + COMPRESS[how](b"more\n")))
    assert (data, source.notes) == (LINES + b"more\n", [])


def test_padding_after_a_gzip_stream_is_ignored(tmp_path: Path) -> None:
    data, source = read(put(tmp_path, gzip.compress(LINES) + b"\0" * 512))
    assert (data, source.notes) == (LINES, [])


@pytest.mark.parametrize("how", COMPRESS)
def test_a_cut_archive_gives_what_could_be_read_and_a_note(tmp_path: Path, how: str) -> None:
    noise = random.Random(1).randbytes(400_000).hex().encode()
    packed = COMPRESS[how](noise)
    data, source = read(put(tmp_path, packed[: len(packed) * 3 // 4]))
    assert noise.startswith(data[:-64])
    # bzip2 works in blocks of 900 kB: nothing of this one is whole
    assert how == "bzip2" or len(data) > len(noise) // 3
    assert len(source.notes) == 1
    assert "ends too early" in source.notes[0]


@pytest.mark.parametrize("how", COMPRESS)
def test_a_damaged_archive_is_no_failure(tmp_path: Path, how: str) -> None:
    packed = bytearray(COMPRESS[how](random.Random(1).randbytes(300_000).hex().encode()))
    packed[len(packed) // 2 : len(packed) // 2 + 40] = b"\xff" * 40
    _, source = read(put(tmp_path, bytes(packed)))
    assert len(source.notes) == 1
    assert "damaged" in source.notes[0]


@pytest.mark.parametrize("how", COMPRESS)
def test_an_archive_that_expands_a_thousandfold_comes_in_small_blocks(tmp_path: Path, how: str) -> None:
    path = put(tmp_path, COMPRESS[how](b"\n" * 50_000_000))
    with open_input(str(path)) as source:
        sizes = [len(block) for block in source.blocks()]
    assert sum(sizes) == 50_000_000
    assert max(sizes) <= 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("magic", "what"),
    [
        (b"PK\x03\x04" + b"\0" * 600, "zip"),
        (b"x" * 257 + b"ustar" + b"\0" * 600, "tar"),
        (b"\x04\x22\x4d\x18" + b"\0" * 600, "lz4"),
    ],
)
def test_archives_that_are_not_unpacked_are_named(tmp_path: Path, magic: bytes, what: str) -> None:
    _, source = read(put(tmp_path, magic))
    assert len(source.notes) == 1
    assert what in source.notes[0]
    assert "unpack it first" in source.notes[0]


# ---- encodings


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("marked", [True, False])
def test_utf16_and_utf32_become_utf8(tmp_path: Path, encoding: str, marked: bool) -> None:
    text = LINES.decode()
    data, source = read(put(tmp_path, (("\ufeff" if marked else "") + text).encode(encoding)))
    assert data.decode() == text
    assert source.kind == "text"
    assert encoding.upper() in source.notes[0]


def test_a_utf8_mark_is_taken_off(tmp_path: Path) -> None:
    data, source = read(put(tmp_path, b"\xef\xbb\xbf" + LINES))
    assert (data, source.notes) == (LINES, [])


def test_utf16_inside_gzip(tmp_path: Path) -> None:
    assert read(put(tmp_path, gzip.compress(("\ufeff" + LINES.decode()).encode("utf-16-le"))))[0] == LINES


def test_bytes_that_are_no_utf8_stay_as_they_are(tmp_path: Path) -> None:
    assert read(put(tmp_path, LINES + b"\xff\xfe\n"))[0] == LINES + b"\xff\xfe\n"


@pytest.mark.parametrize(
    "data", [random.Random(2).randbytes(5000), b"\x7fELF" + b"\0" * 4000, b"\x89PNG\r\n" + bytes(range(256)) * 20]
)
def test_binary_files_are_known_as_such(tmp_path: Path, data: bytes) -> None:
    assert read(put(tmp_path, data))[1].kind == "binary"


@pytest.mark.parametrize(
    "data", ["é中文│█" * 100, "\x1b[1;36mINFO\x1b[0m\r\n" * 50, "7\0\0\0\0\0\0\0x" + "text " * 100]
)
def test_text_is_not_taken_for_binary(tmp_path: Path, data: str) -> None:
    assert read(put(tmp_path, data.encode()))[1].kind == "text"


# ---- what can't be read


def problem(name: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        open_input(str(name))
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)
    return caught.value.problem


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no such file" in problem(tmp_path / "nothing.log")
    assert "not a directory" in problem(put(tmp_path, b"x") / "nothing.log")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux only")
def test_a_file_that_opens_but_gives_an_error_can_not_be_read() -> None:
    assert "can't be read" in problem(Path("/proc/self/mem"))


def test_a_directory_suggests_to_name_its_files(tmp_path: Path) -> None:
    assert f"{tmp_path}/*.log" in problem(tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied"), "no permission"),
        (OSError(116, "Stale file handle"), "Stale file handle"),
    ],
)
def test_a_file_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    path = put(tmp_path, b"x")
    monkeypatch.setattr(Path, "open", refuse)
    assert words in problem(path)


def test_reading_that_breaks_off_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.read
    calls = iter(range(100))

    def broken(descriptor: int, size: int) -> bytes:
        if next(calls) == 1:
            raise OSError(5, "Input/output error")
        return real(descriptor, size)

    path = put(tmp_path, LINES)
    monkeypatch.setattr(os, "read", broken)
    data, source = read(path)
    assert data == LINES[:BLOCK_BYTES]
    assert source.notes == [f"{path}: reading stopped after {BLOCK_BYTES:,} bytes: Input/output error."]


def test_a_device_and_a_socket() -> None:
    assert "device" in problem("/dev/zero")


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.sock")
        assert "socket" in problem("s.sock")


def test_the_null_device_is_an_empty_input() -> None:
    assert read("/dev/null")[1].kind == "empty"


# ---- pipes


def test_a_named_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(LINES,))
    writer.start()
    data, source = read(path)
    writer.join()
    assert (data, source.size) == (LINES, None)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input(pack: Callable[[bytes], bytes]) -> None:
    program = "import sys\nfrom memledger.sources import open_input\nwith open_input('-') as s: sys.stdout.buffer.writelines(s.blocks())"
    done = subprocess.run([sys.executable, "-c", program], input=pack(LINES), capture_output=True, check=True)
    assert done.stdout == LINES


def test_no_standard_input() -> None:
    program = "import os, sys\nfrom memledger.sources import open_input, InputError\nsys.stdin = None\ntry: open_input('-')\nexcept InputError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"-: there is no standard input; name a log file.\n"


# ---- a file that grows


class Growing:
    """`growing` on a real file; each time it would wait, the next change is made."""

    def __init__(self, path: Path, changes: list[Callable[[], object]]) -> None:
        self.notes: list[str] = []
        self._changes = iter(changes)
        self._stream = path.open("rb", buffering=0)
        self._blocks = growing(path, self._stream, 1000, self.notes.append, self._wait)

    def _wait(self, seconds: float) -> None:
        assert seconds > 0
        change = next(self._changes, None)
        if change is None:
            raise StopFollowingError
        change()

    def read(self) -> list[bytes]:
        found: list[bytes] = []
        with self._stream:
            try:
                for block in self._blocks:
                    found.append(block)
            except StopFollowingError:
                pass
        return found


class StopFollowingError(Exception):
    pass


def append(path: Path, data: bytes) -> Callable[[], object]:
    def change() -> None:
        with path.open("ab") as stream:
            stream.write(data)

    return change


def test_a_growing_file_gives_what_is_added_and_says_when_nothing_is(tmp_path: Path) -> None:
    path = put(tmp_path, b"one\n")
    follow = Growing(path, [append(path, b"two\n"), lambda: None, append(path, b"three\n")])
    assert follow.read() == [b"one\n", b"", b"two\n", b"", b"three\n", b""]
    assert follow.notes == []


def test_a_rotated_file_is_read_to_its_end_and_then_its_successor(tmp_path: Path) -> None:
    path = put(tmp_path, b"one\nunfinished")
    old = tmp_path / "server.log.1"

    def rotate() -> None:
        path.rename(old)
        append(old, b" line")()
        put(tmp_path, b"new\n")

    follow = Growing(path, [rotate, append(path, b"newer\n")])
    assert b"".join(follow.read()) == b"one\nunfinished line\nnew\nnewer\n"
    assert len(follow.notes) == 1
    assert "rotated" in follow.notes[0]


def test_a_moved_file_without_a_successor_is_waited_for(tmp_path: Path) -> None:
    path = put(tmp_path, b"one\n")
    follow = Growing(
        path, [lambda: path.rename(tmp_path / "old"), lambda: None, lambda: put(tmp_path, b"new\n"), lambda: None]
    )
    assert b"".join(follow.read()) == b"one\nnew\n"


def test_a_file_cut_to_nothing_is_read_from_its_start(tmp_path: Path) -> None:
    path = put(tmp_path, b"one two three\n")
    follow = Growing(path, [lambda: path.write_bytes(b"new\n")])
    assert b"".join(follow.read()) == b"one two three\nnew\n"
    assert "cut" in follow.notes[0]


def test_a_pipe_is_followed_to_its_end_and_says_when_nothing_is_new() -> None:
    read, write = os.pipe()
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: os.write(write, b"two\n"),
        lambda: os.close(write),
    ]
    os.write(write, b"one\n")
    assert list(arriving(read, 1000, lambda _: steps.pop(0)())) == [b"one\n", b"", b"two\n", b""]
    os.close(read)


def test_following_ends_when_told_so(tmp_path: Path) -> None:
    path = tmp_path / "grow.log"
    path.write_bytes(b"one\n")
    ends: list[int] = []
    with path.open("rb", buffering=0) as stream:
        blocks = growing(path, stream, 1000, print, lambda _: ends.append(1), lambda: bool(ends))
        assert list(blocks) == [b"one\n", b""]
    read, write = os.pipe()
    os.write(write, b"one\n")
    assert list(arriving(read, 1000, lambda _: ends.append(1), lambda: len(ends) > 1)) == [b"one\n", b""]
    os.close(read)
    os.close(write)


def test_what_is_missing_of_an_input_is_told_apart_from_what_is_odd(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(os.urandom(5000))[:-100])
    with open_input(str(path)) as source:
        list(source.blocks())
    assert source.incomplete == source.notes
    wide = tmp_path / "wide.log"
    wide.write_bytes("hello\n".encode("utf-16"))
    with open_input(str(wide)) as source:
        list(source.blocks())
    assert len(source.notes) == 1
    assert source.incomplete == []


def test_following_a_compressed_file_reads_it_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, gzip.compress(LINES))
    with open_input(str(path), follow=True) as source:
        assert b"".join(source.blocks()) == LINES
    assert "not followed" in source.notes[0]


def test_blocks_of_a_followed_file_come_as_it_grows(tmp_path: Path) -> None:
    path = put(tmp_path, b"one\n")
    with open_input(str(path), follow=True) as source:
        blocks: Iterator[bytes] = source.blocks()
        assert next(blocks) == b"one\n"
        assert next(blocks) == b""
        append(path, b"two\n")()
        assert next(block for block in blocks if block) == b"two\n"
