"""Bad input of a hundred kinds: one sentence that names it, a remedy, a non-zero exit status, and no traceback."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest

from serl_chunk.main import main

EXPERIMENT = """\
import gymnasium

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig


def make(fake_env):
    {body}


def experiment():
    return ExperimentConfig("mine", GymConfig(make=make, robot_name="mine", control_hz=20, max_episode_steps=100))
"""
FILES = {
    "torn.hdf5": "this is no HDF5 file",
    "notes.txt": "neither are these episodes",
    "syntax.py": "def experiment(:\n    pass\n",
    "raises.py": "def experiment():\n    return 1 / 0\n",
    "nothing.py": "x = 1\n",
    "wrong_type.py": "def experiment():\n    return {'name': 'mine'}\n",
    "imports.py": "import no_such_module_at_all\n",
    "make_raises.py": EXPERIMENT.format(body="raise RuntimeError('the camera is not connected')"),
    "make_none.py": EXPERIMENT.format(body="return None"),
    "file": "",
    "empty/": "",
    "hdf5/episode_0.hdf5": "torn",
    "no_json/config.json": "{",
    "newer/config.json": json.dumps({"format": 999, "name": "fake_aloha"}),
    "older/config.json": json.dumps({"format": 2, "name": "fake_aloha", "serl_chunk": {"version": "0.0.9"}}),
    "older/metrics.jsonl": "",
    "kept/config.json": json.dumps({"format": 4, "name": "fake_aloha"}),
    "no_run/metrics.jsonl": "",
    "weights.npz": "no archive",
}
TRAIN = "--exp_name fake_aloha --local --debug"
# command line (T/ is a folder with FILES) -> what the sentence must contain
BAD: dict[str, tuple[str, ...]] = {
    # which command, which experiment
    "trian": ("trian", "record"),
    "--exp_name fake_aloha": ("--learner", "--actor", "--local"),
    "--learner": ("--exp_name", "fake_aloha"),
    "--exp_name fake_alhoa --learner": ("fake_alhoa", "fake_aloha"),
    "--exp_name T/missing.py --learner": ("missing.py",),
    "--exp_name T/notes.txt --learner": ("notes.txt", ".py"),
    "--exp_name T/syntax.py --learner": ("syntax.py:1",),
    "--exp_name T/raises.py --learner": ("raises.py:2", "ZeroDivisionError"),
    "--exp_name T/nothing.py --learner": ("nothing.py", "experiment()"),
    "--exp_name T/wrong_type.py --learner": ("wrong_type.py", "ExperimentConfig"),
    "--exp_name T/imports.py --learner": ("imports.py", "no_such_module_at_all"),
    "--exp_name T/make_raises.py --local --debug": ("make_raises.py:8", "the camera is not connected"),
    "--exp_name T/make_none.py --local --debug": ("make", "None"),
    "--exp_name fake_aloha:variant --learner": ("fake_aloha", "variant"),
    "--exp_name hil_serl_template:no_task --learner": ("no_task", "egg_flip"),
    "rollback T/no_run --to 3": ("no_run", "config.json"),
    "rollback T/older --to 3": ("older", "config.json", "format", "2"),
    "rollback T/kept --to 3": ("--to", "version 3", "kept", "no version has a checkpoint", "new run"),
    "rollback T/kept --to three": ("--to", "three"),
    # flags that exclude or need one another
    "--exp_name fake_aloha --local --learner": ("--local", "--learner"),
    "--exp_name fake_aloha --learner --ip 1.2.3.4": ("--ip",),
    "--exp_name fake_aloha --actor --demo_path T/empty": ("--demo_path", "--actor"),
    "--exp_name fake_aloha --actor --checkpoint_path T/run": ("--checkpoint_path", "--actor"),
    "--exp_name fake_aloha --learner --spool_path T/spool": ("--spool_path",),
    "--exp_name fake_aloha --learner --save_video": ("--save_video", "--eval_n_trajs"),
    "--exp_name fake_aloha --actor --eval_n_trajs 5": ("--eval_checkpoint_step",),
    "--exp_name fake_aloha --actor --eval_checkpoint_step 5": ("--eval_n_trajs",),
    "--exp_name fake_aloha --actor --eval_n_trajs -1": ("--eval_n_trajs", "-1"),
    "--exp_name fake_aloha --learner --pin_cores": ("--pin_cores", "--actor"),
    "--exp_name fake_aloha --local --keys T/empty": ("--keys", "--local"),
    "--exp_name fake_aloha --learner --keys T/empty --insecure": ("--keys", "--insecure"),
    "--exp_name fake_aloha --learner --online_steps 0 --bind 0.0.0.0": ("--bind", "--online_steps"),
    "--exp_name fake_aloha --learner --actor --online_steps 0": ("--actor", "--online_steps"),
    "--exp_name fake_aloha --learner --eval_episodes 3": ("--eval_episodes", "--eval_interval"),
    "--exp_name fake_aloha --learner --dataset_replace_interval 9": ("--dataset_replace_interval", "--dataset_dir"),
    "--exp_name fake_aloha --learner --demo_success --demo_failure": ("--demo_success", "--demo_failure"),
    # values of flags
    "--exp_name fake_aloha --learner --seed x": ("--seed", "x"),
    "--exp_name fake_aloha --learner --seed -1": ("--seed", "-1"),
    "--exp_name fake_aloha --learner --port 70000": ("port", "70000"),
    "--exp_name fake_aloha --learner --bind no.such.interface.invalid": ("--bind", "no.such.interface.invalid"),
    "--exp_name fake_aloha --actor --ip no-such-host.invalid": ("--ip", "no-such-host.invalid"),
    "--exp_name fake_aloha --actor --actor_id a/b": ("--actor_id", "a/b"),
    "--exp_name fake_aloha --learner --utd_ratio 0": ("--utd_ratio", "0"),
    "--exp_name fake_aloha --learner --utd_ratio fast": ("--utd_ratio", "fast"),
    "--exp_name fake_aloha --learner --horizon_length 0": ("--horizon_length", "0"),
    "--exp_name fake_aloha --actor --config.agent.language.tokenizer=bytes": (
        "--config.agent.language.length",
        "pick the cube",
        "82",
        "48",
    ),
    "--exp_name fake_aloha --actor --config.agent.language.tokenizer=bytes --task=": ("--task", "empty", "bytes"),
    "--exp_name fake_aloha --learner --online_steps -5": ("--online_steps", "-5"),
    "--exp_name fake_aloha --learner --sparse=perhaps": ("--sparse", "perhaps"),
    "--exp_name fake_aloha --learner --preset no_such": ("no_such", "qc"),
    "--exp_name fake_aloha --learner --compat no_such": ("no_such", "qc"),
    "--exp_name fake_aloha --learner --env_name other": ("--env_name", "FakeAlohaConfig"),
    "--exp_name fake_aloha --learner --demo_color yuv": ("--demo_color", "rgb"),
    "--exp_name fake_aloha --local --demo_proportion 2 --demo_path T/empty": ("--demo_proportion", "2"),
    "--exp_name fake_aloha --local --demo_hz -1 --demo_path T/empty": ("--demo_hz", "-1"),
    "--exp_name fake_aloha --local --demo_scores score_5 --demo_path T/empty": ("--demo_scores", "score_5"),
    "--exp_name fake_aloha --lerner": ("--lerner", "--learner"),
    # fields of the experiment
    f"{TRAIN} --config.agent.lr=-1": ("--config.agent.lr", "-1"),
    f"{TRAIN} --config.agent.lr=fast": ("--config.agent.lr", "fast"),
    f"{TRAIN} --config.agent.learning_rate=1": ("agent.learning_rate",),
    f"{TRAIN} --config.learner.batch_sise=1": ("batch_sise", "batch_size"),
    f"{TRAIN} --config.chunk.horizon=": ("chunk.horizon",),
    f"{TRAIN} --config.discount=1.5": ("discount", "1.5"),
    f"{TRAIN} --config.agent.critic.hidden=0": ("agent.critic.hidden", "0"),
    f"{TRAIN} --config.agent.flow.spread=3": ("agent.flow.spread", "3", "2"),
    f"{TRAIN} --config.actor.clock=fast": ("actor.clock", "fast", "realtime"),
    f"{TRAIN} --config.actor.clock=realtime": ("actor.clock", "lockstep"),
    f"{TRAIN} --config.chunk.execute_steps=99": ("chunk.execute_steps", "99"),
    f"{TRAIN} --config.replay.demo_fraction=2": ("replay.demo_fraction", "2"),
    f"{TRAIN} --config.transport.timeout_s=0": ("transport.timeout_s", "0"),
    f"{TRAIN} --config.agent.image_keys=front": ("front", "top"),
    f"{TRAIN} --config.agent.kind=ppo": ("agent.kind",),
    f"{TRAIN} --utd_ratio 1 --config.learner.utd_ratio=2": ("--utd_ratio", "--config.learner.utd_ratio"),
    f"{TRAIN} --config.preset=qc": ("preset", "--preset"),
    # files
    f"{TRAIN} --demo_path T/missing": ("missing",),
    f"{TRAIN} --demo_path T/empty": ("empty",),
    f"{TRAIN} --demo_path T/torn.hdf5": ("torn.hdf5",),
    f"{TRAIN} --demo_path T/notes.txt": ("notes.txt", "lerobot"),
    f"{TRAIN} --demo_path ''": ("--demo_path",),
    f"{TRAIN} --demo_path T/hdf5 --demo_format no_such": ("no_such", "lerobot"),
    f"{TRAIN} --checkpoint_path T/file": ("file", "is a file, expected a folder"),
    f"{TRAIN} --checkpoint_path T/no_json": ("config.json",),
    f"{TRAIN} --checkpoint_path T/newer": ("config.json", "999", "start a new run"),
    f"{TRAIN} --checkpoint_path T/older": ("config.json", "2", "serl_chunk 0.0.9", "start a new run"),
    "--exp_name fake_aloha --actor --eval_checkpoint_step latest --eval_n_trajs 1 --checkpoint_path T/older": (
        "config.json",
        "serl_chunk 0.0.9",
    ),
    "--exp_name fake_aloha --actor --eval_checkpoint_step latest --eval_n_trajs 1 --checkpoint_path T/missing": (
        "missing",
    ),
    "--exp_name fake_aloha --actor --eval_checkpoint_step latest --eval_n_trajs 1 --checkpoint_path T/empty": (
        "empty",
    ),
    # other commands
    "record --exp_name fake_aloha": ("--out",),
    "record --exp_name fake_aloha --out T/out --n_demos 0": ("--n_demos", "0"),
    "record --exp_name fake_aloha --out T/out --policy mine": ("--policy", "mine"),
    "record --exp_name fake_aloha --out T/out --cameras front": ("front", "top"),
    "record --exp_name fake_aloha --out T/file --n_demos 1": ("file", "is a file, expected a folder"),
    "report T/missing": ("missing",),
    "report T/empty": ("empty",),
    "report T/older": ("config.json", "serl_chunk 0.0.9"),
    "data": ("convert",),
    "data inspect T/missing": ("missing",),
    "data inspect T/notes.txt": ("notes.txt",),
    "data convert T/hdf5": ("--out",),
    "data convert T/hdf5 --from no_such --to hdf5 --out T/out": ("no_such",),
    "data stats T/empty --out T/stats.json": ("empty",),
    "data export T/empty --format hdf5 --out T/out": ("empty",),
    "keys": ("add",),
    "keys join not-a-token --keys T/keys": ("sc1-",),
    "keys revoke nobody --keys T/keys": ("keys init",),
    "keys add left_cell --keys T/keys": ("keys init",),
    "doctor --port 0": ("port", "0"),
    "config no_such": ("no_such", "fake_aloha"),
    "config fake_aloha agent.no_such": ("agent.no_such",),
    "new T/syntax.py": ("syntax.py",),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(text)
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence_with_a_remedy(
    line: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", str(files / "home"))
    status: int | str | None = None
    with contextlib.suppress(SystemExit):
        status = main([word.replace("T/", f"{files}/") for word in shlex.split(line)])
    error = capsys.readouterr().err.strip()
    assert status in (1, 2), error
    assert "Traceback" not in error
    assert "Errno" not in error
    last = error.splitlines()[-1]
    assert last.startswith("serl-chunk: ")
    for part in BAD[line]:
        assert part in last
    assert not re.search(r"\b(said|told|nobody knows)\b", last)


def test_there_are_at_least_eighty():
    assert len(BAD) >= 80
