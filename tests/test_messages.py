"""The messages that users see often, compared with `tests/golden/messages.txt`.

After a message was changed on purpose, write the file anew:

    GOLDEN=write .venv/bin/python -m pytest tests/test_messages.py
"""

from __future__ import annotations

import difflib
import math
import os
import re
import textwrap
from pathlib import Path

from serl_chunk.cli import learner as learner_command
from serl_chunk.main import main
from serl_chunk.runs import status_line
from serl_chunk.runs.status_line import StatusFields, format_status

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
WIDTH = 120  # columns in the file; longer messages continue on indented lines
EXP = ["--exp_name", "fake_aloha"]
EVALUATE = ["--eval_checkpoint_step", "latest", "--eval_n_trajs", "5"]
TINY = ["--preset", "bc-gaussian", "--debug", "--config.agent.hidden=4", "--config.learner.pretrain_steps=0"]
TINY += ["--config.learner.warmup_episodes=1", "--config.learner.max_steps=2", "--config.learner.batch_size=4"]
TINY += ["--config.robot.max_episode_steps=10", "--config.learner.checkpoint_period=2"]

REFUSED: list[list[str]] = [
    ["train"],
    ["--learner"],
    EXP,
    ["--exp_name", "nothing", "--learner"],
    ["--exp_name", "{tmp}/absent.py", "--learner"],
    [*EXP, "--lerner"],
    [*EXP, "--learner", "--preset", "qq"],
    [*EXP, "--learner", "--config.agent.lrr=1"],
    [*EXP, "--learner", "--config.agent.lr=fast"],
    [*EXP, "--learner", "--config.learner.utd_ratio=0"],
    [*EXP, "--learner", "--config.agent.image_keys=top,left"],
    [*EXP, "--learner", "--demo_path", "{tmp}/absent"],
    [*EXP, "--learner", "--checkpoint_path", "{tmp}/file"],
    [*EXP, "--local", "--learner"],
    [*EXP, "--local", "--config.actor.clock=realtime"],
    [*EXP, "--actor", "--demo_path", "{tmp}"],
    [*EXP, "--actor", "--ip", "robot", "--keys", "{tmp}"],
    [*EXP, "--actor", "--eval_n_trajs", "5"],
    [*EXP, "--actor", *EVALUATE, "--checkpoint_path", "{tmp}/absent"],
    [*EXP, "--actor", *EVALUATE, "--checkpoint_path", "{tmp}/run", "--preset", "qc"],
    ["report", "{tmp}/absent"],
    ["data", "inspect", "{tmp}/absent"],
    ["data", "inspect", "{tmp}/file"],
    ["record", *EXP, "--out", "{tmp}/file"],
    ["keys", "join", "serl-chunk keys join nothing", "--keys", "{tmp}/keys"],
    ["keys", "revoke", "left_cell", "--keys", "{tmp}/keys"],
]

STATES: list[tuple[str, StatusFields]] = [
    ("warm-up", {"phase_number": 2, "phase_total": 3, "done": 4, "total": 20, "step": 0, "env_steps": 480}),
    ("train", {"learner_wait": 0.9, "actor_wait": 0.0, "steps_missing": 312, "actors": ("left_cell",)}),
    ("train", {"learner_wait": 0.9, "actor_wait": 0.0, "steps_missing": 312, "actors": ()}),
    ("train", {"learner_wait": 0.0, "actor_wait": 0.9, "may_record": 0, "updates_due": 48, "actors": ("left_cell",)}),
    ("train", {"learner_wait": 0.0, "actor_wait": 0.0, "stalled": "the disk is full", "empty_half": "demo"}),
]


def masked(text: str, tmp: Path) -> str:
    """Leave times, numbers and the test's folder out."""
    text = text.replace(str(tmp), "TMP")
    text = re.sub(r"(?m)^\d\d:\d\d:\d\d ", "HH:MM:SS ", text)
    return re.sub(r"\d+(,\d{3})*(\.\d+)?", "N", text)


def wrapped(text: str) -> str:
    """`text` in lines of `WIDTH` columns at most."""
    fill = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(map(fill, text.rstrip().splitlines()))


def test_messages_that_users_see_often(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learner_command, "build_report", lambda path: path / "report.html")  # takes seconds
    monkeypatch.setattr(status_line, "LOG_PERIOD", math.inf)  # on a slow machine there would be more lines
    (tmp_path / "file").write_text("text")
    capsys.readouterr()
    parts = []
    for arguments in ([*EXP, "--local", "--checkpoint_path", str(tmp_path / "run"), *TINY],) * 2:
        assert main(arguments) == 0
        parts.append(masked(capsys.readouterr().out, tmp_path))
    for words in REFUSED:
        assert main([word.format(tmp=tmp_path) for word in words]) != 0
        _, err = capsys.readouterr()
        parts.append(f"$ serl-chunk {' '.join(words).format(tmp='TMP')}\n{err.replace(str(tmp_path), 'TMP')}")
    parts += [format_status(phase, fields, 75.0) for phase, fields in STATES]
    text = "\n\n".join(map(wrapped, parts)) + "\n"
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    changed = difflib.unified_diff(GOLDEN.read_text().splitlines(), text.splitlines(), "golden", "now", lineterm="")
    assert not (lines := list(changed)), "\n".join([*lines, *(__doc__ or "").splitlines()[2:]])
