from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from serl_chunk.io import (
    WaitLog,
    atomic_path,
    atomic_write,
    folder_fault,
    format_bytes,
    format_duration,
    os_reason,
    plural,
)


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path):
    file = tmp_path / "run.json"
    atomic_write(file, "old")
    atomic_write(file, "größer", durable=True)
    assert file.read_text(encoding="utf-8") == "größer"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path):
    file = tmp_path / "run.json"
    atomic_write(file, b"old")

    def fail_half_way():
        with atomic_path(file) as part:
            part.write_text("half of the new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (20 * 2**20, "20 MiB"),
        (1023 * 2**20, "1.0 GiB"),
        (2**51, "2048 TiB"),
    ],
)
def test_bytes_are_formatted_with_binary_units(nbytes: int, text: str):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (12.3, "12 s"), (59.9, "60 s"), (185, "3:05"), (3723, "1:02:03")]
)
def test_durations_are_formatted(seconds: float, text: str):
    assert format_duration(seconds) == text


def test_a_plural_has_an_s():
    assert [plural(n, "episode") for n in (0, 1, 2000)] == ["0 episodes", "1 episode", "2,000 episodes"]


def test_a_wait_is_logged_now_and_then_with_its_remedy_on_the_first_line(caplog):
    caplog.set_level("INFO")
    now = iter((0.0, 4.0, 10.0, 19.0, 20.0, 21.0))
    wait = WaitLog(logging.getLogger("test"), 10.0, clock=now.__next__)
    for second in (0, 4, 10, 19):
        wait.log(f"waiting for {second} s", "Start a learner.")
    wait.end()
    wait.log("waiting again", "Start a learner.", level=logging.WARNING)
    wait.log("unseen")
    assert caplog.messages == [
        "waiting for 0 s. Start a learner.",
        "waiting for 10 s",
        "waiting again. Start a learner.",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]


def test_an_error_of_the_system_is_named_without_its_number(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "missing").read_text()
    assert os_reason(missing.value) == "No such file or directory"
    assert os_reason(ValueError("text")) == "text"
    assert os_reason(OSError()) == "OSError"


@pytest.mark.parametrize(("below", "kind"), [("", FileExistsError), ("a/b", NotADirectoryError)])
def test_a_file_given_as_a_folder_is_named(tmp_path: Path, below: str, kind: type[OSError]):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(kind) as failed:
        (file / below).mkdir(parents=True, exist_ok=True)
    assert folder_fault(file / below, failed.value).startswith(f"{file}: is a file, expected a folder.")
