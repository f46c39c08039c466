"""Bad input of a hundred kinds: one sentence that names it, a remedy, a non-zero exit status, and no traceback."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path

import pytest
from coded_episodes import SPEC
from coded_replay import coded

from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.main import main
from serl_chunk.runs.folder import FORMAT

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
    "kept/config.json": json.dumps({"format": FORMAT, "name": "fake_aloha"}),
    "no_run/metrics.jsonl": "",
    "other/config.json": json.dumps({"format": FORMAT, "name": "other"}),
    "qc/config.json": json.dumps({"format": FORMAT, "name": "fake_aloha", "preset": "qc", "compat": ""}),
    "weights.npz": "no archive",
    "demo.pkl": "x",
}
FAKE = ["--exp_name", "fake_aloha"]
WORDS = {
    "FAKE": FAKE,
    "LOCAL": [*FAKE, "--local", "--debug"],
    "EVALUATE": [*FAKE, "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "1", "--checkpoint_path"],
}
# command line (with WORDS; T/ is a folder with FILES, and five episodes in T/five) -> what the sentence must contain
BAD: dict[str, tuple[str, ...]] = {
    # which command, which experiment
    "trian": ("trian", "record"),
    "FAKE": ("--learner", "--actor", "--local"),
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
    "record --out T/out": ("--exp_name", "fake_aloha", ".py"),
    "serve FAKE": ("--checkpoint_path", "--ip"),
    "config fake_aloha agent.crtic": ("agent.crtic", "Did you mean agent.critic?"),
    "config fake_aloa": ("fake_aloa", "fake_aloha"),
    # flags that exclude or need one another
    "FAKE --local --learner": ("--local", "--learner"),
    "FAKE --learner --ip 1.2.3.4": ("--ip",),
    "FAKE --actor --demo_path T/empty": ("--demo_path", "--actor"),
    "FAKE --actor --checkpoint_path T/run": ("--checkpoint_path", "--actor"),
    "FAKE --learner --spool_path T/spool": ("--spool_path",),
    "FAKE --learner --save_video": ("--save_video", "--eval_n_trajs"),
    "FAKE --actor --eval_n_trajs 5": ("--eval_checkpoint_step",),
    "FAKE --actor --eval_checkpoint_step 5": ("--eval_n_trajs",),
    "FAKE --actor --eval_n_trajs -1": ("--eval_n_trajs", "-1"),
    "FAKE --learner --pin_cores": ("--pin_cores", "--actor"),
    "FAKE --local --keys T/empty": ("--keys", "--local"),
    "FAKE --learner --keys T/empty --insecure": ("--keys", "--insecure"),
    "FAKE --learner --online_steps 0 --bind 0.0.0.0": ("--bind", "--online_steps"),
    "FAKE --learner --actor --online_steps 0": ("--actor", "--online_steps"),
    "FAKE --learner --eval_episodes 3": ("--eval_episodes", "--eval_interval"),
    "FAKE --learner --dataset_replace_interval 9": ("--dataset_replace_interval", "--dataset_dir"),
    "FAKE --learner --demo_success --demo_failure": ("--demo_success", "--demo_failure"),
    "FAKE --learner --actor --eval_checkpoint_step 5 --eval_n_trajs 2":
        ("evaluation", "--actor", "--learner", "--local"),
    "FAKE --local --eval_checkpoint_step 5 --eval_n_trajs 2": ("evaluation", "--actor", "--learner", "--local"),
    "FAKE --actor --save_video": ("--save_video", "--eval_checkpoint_step N", "--eval_n_trajs K"),
    "FAKE --actor --eval_stochastic": ("--eval_stochastic", "--eval_checkpoint_step N"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --eval_arm both --config.agent.candidates 1":
        ("--eval_arm", "both", "agent.candidates", "1"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --demo_path d": ("--demo_path", "evaluation"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --checkpoint_path r --ip h": ("--checkpoint_path", "--ip"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --checkpoint_path r --keys k":
        ("--keys", "--ip", "--checkpoint_path"),
    "FAKE --actor --demo_success": ("--demo_success", "--actor"),
    "FAKE --learner --actor_id left": ("--actor_id", "--learner"),
    "FAKE --local --bind 0.0.0.0": ("--bind", "--local"),
    "FAKE --local --ip gpu": ("--ip", "--local"),
    "FAKE --local --insecure": ("--insecure", "--local"),
    "FAKE --learner --config.actor.inference=async": ("--config.actor.inference", "async", "actor.clock", "realtime"),
    "FAKE --learner --video_episodes 3": ("--video_episodes", "--eval_n_trajs", "--save_video"),
    "FAKE --learner --sparse": ("--sparse", "FakeAlohaConfig", "reward"),
    "FAKE --local --port 5 --online_steps 0": ("--port", "--local"),
    "serve FAKE --checkpoint_path run --ip box": ("--checkpoint_path", "--ip"),
    "serve FAKE --checkpoint_path run --keys k": ("--keys",),
    "serve FAKE --ip box --checkpoint_step 5": ("--checkpoint_step",),
    "serve FAKE --checkpoint_path run --bind 0.0.0.0": ("--bind", "--api_key FILE", "--insecure"),
    "serve FAKE --checkpoint_path run --bind 192.168.0.3": ("--bind", "192.168.0.3"),
    "serve FAKE --checkpoint_path run --api_key absent --insecure": ("--insecure",),
    "serve FAKE --checkpoint_path run --config.actor.policy=openpi://a:1": ("actor.policy",),
    "report T/a T/b --films 1": ("--films",),
    "record FAKE --out T/out --port 5": ("--port", "--ip"),
    "data convert T/five --out T/out --to=hdf5 --mode=image": ("--mode", "--to hdf5"),
    "data convert T/five --out T/out --to=hdf5 --push_to_hub": ("--push_to_hub", "--to hdf5"),
    "data convert T/five --out T/out --to=lerobot --compress": ("--compress", "HDF5", "--image_codec"),
    "data convert T/five --out T/out --to=lerobot --mode=video --image_codec=png":
        ("--image_codec", "--mode image", "--mode video"),
    "data convert T/five --out T/out --to=lerobot --push_to_hub": ("--push_to_hub", "--repo_id"),
    # values of flags
    "FAKE --learner --seed x": ("--seed", "x"),
    "FAKE --learner --seed -1": ("--seed", "-1"),
    "FAKE --learner --port 70000": ("port", "70000"),
    "FAKE --learner --bind no.such.interface.invalid": ("--bind", "no.such.interface.invalid"),
    "FAKE --actor --ip no-such-host.invalid": ("--ip", "no-such-host.invalid"),
    "FAKE --actor --actor_id a/b": ("--actor_id", "a/b"),
    "FAKE --learner --utd_ratio 0": ("--utd_ratio", "0"),
    "FAKE --learner --utd_ratio fast": ("--utd_ratio", "fast"),
    "FAKE --learner --horizon_length 0": ("--horizon_length", "0"),
    "FAKE --actor --config.agent.language.tokenizer=bytes":
        ("--config.agent.language.length", "pick the cube", "82", "48"),
    "FAKE --actor --config.agent.language.tokenizer=bytes --task=": ("--task", "empty", "bytes"),
    "FAKE --learner --online_steps -5": ("--online_steps", "-5"),
    "FAKE --learner --sparse=perhaps": ("--sparse", "perhaps"),
    "FAKE --learner --preset no_such": ("no_such", "qc"),
    "FAKE --learner --compat no_such": ("no_such", "qc"),
    "FAKE --learner --env_name other": ("--env_name", "FakeAlohaConfig"),
    "FAKE --learner --demo_color yuv": ("--demo_color", "rgb"),
    "FAKE --local --demo_proportion 2 --demo_path T/empty": ("--demo_proportion", "2"),
    "FAKE --local --demo_hz -1 --demo_path T/empty": ("--demo_hz", "-1"),
    "FAKE --local --demo_scores score_5 --demo_path T/empty": ("--demo_scores", "score_5"),
    "FAKE --lerner": ("--lerner", "--learner"),
    "FAKE --learn": ("--learn", "--learner"),
    "FAKE --learner extra": ("extra", "--config.FIELD=VALUE", "serl-chunk --help_all"),
    "FAKE --learner --port": ("--port", "serl-chunk --help"),
    "FAKE --actor --demo_paths x": ("--demo_paths", "--demo_path"),
    "FAKE --learner --demo_scores x": ("--demo_scores", "x", "FOLDER=REWARD"),
    "FAKE --learner --offline_steps x": ("--offline_steps", "x"),
    "FAKE --learner --offline_steps -1": ("--offline_steps", "-1", "0"),
    "serve FAKE --checkpoint_path run --max_batch 0": ("--max_batch", "0"),
    "serve FAKE --checkpoint_path run --max_batch 257": ("--max_batch", "257", "256"),
    "serve FAKE --checkpoint_path run --port 65536": ("--port", "65536", "65535"),
    "serve FAKE --checkpoint_path run --api_key absent": ("--api_key", "absent"),
    "record FAKE --out T/out --n_demo 3": ("--n_demo", "--n_demos"),
    "record FAKE --out T/out --cameras top,top": ("--cameras", "top"),
    "record FAKE --out T/out --keep some": ("--keep", "some", "successes"),
    "keys remove": ("remove", "init", "add", "serl-chunk keys --help"),
    "keys add": ("NAME", "serl-chunk keys add --help"),
    "keys join": ("LINE", "serl-chunk keys join --help"),
    "keys add left --port 65535": ("--port", "65535", "1..65533"),
    "report": ("run", "serl-chunk report --help"),
    "data convert T/five --out T/out --to=zarr": ("--to", "zarr", "hdf5", "lerobot"),
    "data convert T/five --out T/out --to=hdf5 --max_samples=0": ("--max_samples", "0", "1"),
    "data convert T/five --out T/out --to=hdf5 --hz 0": ("--hz", "0"),
    "data convert T/five --out T/out --to=hdf5 --hz=nan": ("--hz", "nan", "0"),
    "data convert T/five --out T/out --to=hdf5 --hz=-5": ("--hz", "-5", "0"),
    "data convert T/five --out T/out --to=hdf5 --tolerance_s nan": ("--tolerance_s", "nan", "0"),
    "data convert T/five --out T/out --to=hdf5 --proportion 0": ("--proportion", "0", "(0, 1]"),
    "data convert T/five --out T/out --to=hdf5 --episodes 7": ("--episodes", "7", "0..4"),
    "data convert T/five --out T/out --to=hdf5 --episodes 0,0": ("--episodes", "0,0"),
    "data convert T/five --out T/out --to=hdf5 --episodes ²": ("--episodes", "²"),
    "data convert T/five --out T/out --to=hdf5 --episodes 3-1": ("--episodes", "3-1"),
    "data convert T/five --out T/out --to=hdf5 --episodes 2-99": ("--episodes", "99", "0..4"),
    "data convert T/five --out T/out --to=hdf5 --scores score_5=nan": ("--scores", "score_5=nan", "FOLDER=REWARD"),
    # fields of the experiment
    "LOCAL --config.agent.lr=-1": ("--config.agent.lr", "-1"),
    "LOCAL --config.agent.lr=fast": ("--config.agent.lr", "fast"),
    "LOCAL --config.agent.learning_rate=1": ("agent.learning_rate",),
    "LOCAL --config.learner.batch_sise=1": ("batch_sise", "batch_size"),
    "LOCAL --config.chunk.horizon=": ("chunk.horizon",),
    "LOCAL --config.discount=1.5": ("discount", "1.5"),
    "LOCAL --config.agent.critic.hidden=0": ("agent.critic.hidden", "0"),
    "LOCAL --config.agent.flow.spread=3": ("agent.flow.spread", "3", "2"),
    "LOCAL --config.actor.clock=fast": ("actor.clock", "fast", "realtime"),
    "LOCAL --config.actor.clock=realtime": ("actor.clock", "lockstep"),
    "LOCAL --config.chunk.execute_steps=99": ("chunk.execute_steps", "99"),
    "LOCAL --config.replay.demo_fraction=2": ("replay.demo_fraction", "2"),
    "LOCAL --config.transport.timeout_s=0": ("transport.timeout_s", "0"),
    "LOCAL --config.agent.image_keys=front": ("front", "top"),
    "LOCAL --config.agent.kind=ppo": ("agent.kind",),
    "LOCAL --utd_ratio 1 --config.learner.utd_ratio=2": ("--utd_ratio", "--config.learner.utd_ratio"),
    "LOCAL --config.preset=qc": ("preset", "--preset"),
    "LOCAL --config.agent.lr": ("--config.agent.lr=VALUE",),
    # files
    "LOCAL --demo_path T/missing": ("missing",),
    "LOCAL --demo_path T/empty": ("empty",),
    "LOCAL --demo_path T/torn.hdf5": ("torn.hdf5",),
    "LOCAL --demo_path T/notes.txt": ("notes.txt", "lerobot"),
    "LOCAL --demo_path ''": ("--demo_path",),
    "LOCAL --demo_path T/hdf5 --demo_format no_such": ("no_such", "lerobot"),
    "LOCAL --checkpoint_path T/file": ("file", "is a file, expected a folder"),
    "LOCAL --checkpoint_path T/no_json": ("config.json",),
    "LOCAL --checkpoint_path T/newer": ("config.json", "999", "start a new run"),
    "LOCAL --checkpoint_path T/older": ("config.json", "2", "serl_chunk 0.0.9", "start a new run"),
    "EVALUATE T/older": ("config.json", "serl_chunk 0.0.9"),
    "EVALUATE T/missing": ("missing",),
    "EVALUATE T/empty": ("empty",),
    "data convert T/five --to hdf5 --out T/five/sub": ("five/sub",),
    "serve FAKE --checkpoint_path T/missing": ("missing",),
    "data export T/five --format hdf5 --out T/out --workers 0": ("five", "serl-chunk data convert"),
    "EVALUATE T/other": ("other", "fake_aloha"),
    "EVALUATE T/kept": ("kept", "checkpoint"),
    "EVALUATE T/qc": ("qc", "--preset"),
    "EVALUATE T/qc --preset qc --compat qc": ("--compat", "none", "qc"),
    "LOCAL --demo_path T/demo.pkl": ("demo.pkl",),
    "FAKE --learner --debug --offline_steps 1 --online_steps 0 --checkpoint_path T/run --dataset_dir T/empty":
        ("empty", "*-val.npz"),
    # other commands
    "record FAKE": ("--out",),
    "record FAKE --out T/out --n_demos 0": ("--n_demos", "0"),
    "record FAKE --out T/out --policy mine": ("--policy", "mine"),
    "record FAKE --out T/out --cameras front": ("front", "top"),
    "record FAKE --out T/file --n_demos 1": ("file", "is a file, expected a folder"),
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
    "new a-b.py": ("a-b.py",),
    "new x.txt": ("x.txt",),
    "new no/x.py": ("no",),
}  # fmt: skip
FAILED = {  # status 1: what was asked for is right, and what it names is not
    "rollback T/kept --to 3",
    "EVALUATE T/kept",
    "LOCAL --demo_path T/torn.hdf5",
    "LOCAL --demo_path T/demo.pkl",
    "FAKE --learner --debug --offline_steps 1 --online_steps 0 --checkpoint_path T/run --dataset_dir T/empty",
    "report T/missing",
    "report T/empty",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(text)
    (folder / "five").mkdir()
    for k in range(5):
        write_episode(folder / "five" / f"episode_{k}.hdf5", coded(k, 4).episode(), SPEC)
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence_with_a_remedy(line, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", str(files / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    words = [word for part in shlex.split(line) for word in WORDS.get(part, [part.replace("T/", f"{files}/")])]
    status: int | str | None = None
    with contextlib.suppress(SystemExit):
        status = main(words)
    error = capsys.readouterr().err.strip()
    assert status == (1 if line in FAILED else 2), error
    assert "Traceback" not in error
    assert "Errno" not in error
    last = error.splitlines()[-1]
    assert last.startswith("serl-chunk: ")
    assert [part for part in BAD[line] if part not in last] == []
    assert not list(files.glob("out*"))
