"""Files that are written whole, numbers in words, lines about waiting, and what is wrong with a folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from serl_chunk.io import (
    Waiting,
    atomic_path,
    atomic_write,
    folder_fault,
    format_bytes,
    format_duration,
    os_reason,
    plural,
)


def test_an_atomic_write_replaces_the_file_whole_or_not_at_all(tmp_path: Path):
    file = tmp_path / "run.json"
    atomic_write(file, "old")
    atomic_write(file, "größer", durable=True)

    def fail_half_way():
        with atomic_path(file) as part:
            part.write_text("half of the new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert file.read_text(encoding="utf-8") == "größer"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(("written", "given", "text"), [
    (format_bytes, 999, "999 B"), (format_bytes, 1536, "1.5 KiB"), (format_bytes, 2**51, "2048 TiB"),
    (format_duration, 59.9, "60 s"), (format_duration, 185, "3:05"),
    (format_duration, 3723, "1:02:03"), (lambda n: plural(n, "episode"), 1, "1 episode"),
    (lambda n: plural(n, "episode"), 2000, "2,000 episodes"), (os_reason, ValueError("text"), "text"),
    (os_reason, OSError(), "OSError"), (os_reason, FileNotFoundError(2, "No such file", "/f"), "No such file"),
])  # fmt: skip
def test_bytes_durations_numbers_and_errors_of_the_system_in_words(written, given, text):
    assert written(given) == text


def test_a_wait_is_logged_now_and_then_with_its_remedy_on_the_first_line(caplog):
    caplog.set_level("INFO")
    now = iter((0.0, 4.0, 10.0, 19.0, 20.0, 21.0))
    wait = Waiting(logging.getLogger("test"), 10.0, clock=now.__next__)
    for second in (0, 4, 10, 19):
        wait.log(f"waiting for {second} s", "Start a learner.")
    wait.end()
    wait.log("waiting again", "Start a learner.", level=logging.WARNING)
    wait.log("unseen")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "waiting for 0 s. Start a learner."),
        ("INFO", "waiting for 10 s"),
        ("WARNING", "waiting again. Start a learner."),
    ]


@pytest.mark.parametrize(("below", "kind"), [("", FileExistsError), ("a/b", NotADirectoryError)])
def test_a_file_given_as_a_folder_is_named(tmp_path: Path, below: str, kind: type[OSError]):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(kind) as failed:
        (file / below).mkdir(parents=True, exist_ok=True)
    assert folder_fault(file / below, failed.value).startswith(f"{file}: is a file, expected a folder.")
