"""Runs a program of this folder with the interpreter that SERL_CHUNK_LEROBOT_PYTHON names and that has lerobot."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import serl_chunk_robot

PYTHON = os.environ.get("SERL_CHUNK_LEROBOT_PYTHON")


def run(program: str, folder: Path) -> dict[str, Any]:
    """Return the JSON that the program printed last; skip the test without that interpreter."""
    package = Path(serl_chunk_robot.__file__).resolve().parents[1]
    # What the interpreter has of its own stays first.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(package)])}
    if not PYTHON or subprocess.run([PYTHON, "-c", "import lerobot.motors.feetech, scservo_sdk"],
                                    env=environment, capture_output=True, check=False).returncode:  # fmt: skip
        pytest.skip("SERL_CHUNK_LEROBOT_PYTHON names no interpreter that has lerobot[feetech]")
    done = subprocess.run([PYTHON, program, str(folder)], env=environment, capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found
