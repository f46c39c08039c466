"""Bad input of a hundred kinds: one sentence that names it, a remedy, a non-zero exit status, and no traceback."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from pathlib import Path

import pytest
from coded_episodes import SPEC
from coded_replay import coded
from journal_runs import Run

from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
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
    "classifier/classifier.json": "{}",
    "one_arm.toml": 'name = "one"\n[driver]\nname = "fake"\narms = 1\n',
}
FAKE = ["--exp_name", "fake_aloha"]
WORDS = {
    "FAKE": FAKE,
    "LOCAL": [*FAKE, "--local", "--debug"],
    "SERVED": ["--config.actor.policy=openpi://127.0.0.1:8123"],
    "SERVED0": ["--config.actor.policy=openpi://127.0.0.1:81230"],
    "HUMAN": ["record", *FAKE, "--out", "T/out", "--policy", "human"],
    "TRAIN": ["classifier", "train", "T/five", "--cameras", "a", "--out", "T/new"],
    "ARMS": ["--file", "experiments/robots/fake_aloha.toml"],
    "EVALUATE": [*FAKE, "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "1", "--checkpoint_path"],
}
# command line (with WORDS; T/ is a folder with FILES, and five episodes in T/five) -> what the sentence must contain
BAD: dict[str, tuple[str, ...]] = {
    # which command, which experiment
    "trian": ("trian", "record"),
    "FAKE": ("--learner", "--actor", "--local"),
    "--learner": ("--exp_name", "fake_aloha"),
    "--exp_name fake_alhoa --learner": ("fake_alhoa", "fake_aloha"),
    "--exp_name T/make_raises.py --local --debug": ("make_raises.py:8", "the camera is not connected"),
    "--exp_name T/make_none.py --local --debug": ("make", "None"),
    "rollback T/no_run --to 3": ("no_run", "config.json"),
    "rollback T/older --to 3": ("older", "config.json", "format", "2"),
    "rollback T/kept --to 3": ("--to", "version 3", "kept", "no version has a checkpoint", "new run"),
    "rollback T/kept --to three": ("--to", "three"),
    "record --out T/out": ("--exp_name", "fake_aloha", ".py"),
    "serve FAKE": ("--checkpoint_path", "--ip"),
    "config fake_aloha nothing": ("nothing", "agent.flow", "robot"),
    "doctor --timeout 1": ("unknown argument '--timeout'", "--help_all"),
    "robot dry T/five": ("serl-chunk: robot.toml: no TOML file",),
    "FAKE --actor --config.actor.intervention=telepathy":
        ("--config.actor.intervention", "telepathy", "spacemouse"),
    "config fake_aloha agent.crtic": ("agent.crtic", "Did you mean agent.critic?"),
    # flags that exclude or need one another
    "FAKE --local --learner": ("--local", "--learner"),
    "FAKE --learner --ip 1.2.3.4": ("--ip",),
    "FAKE --actor --demo_path T/empty": ("--demo_path", "--actor"),
    "FAKE --actor --eval_n_trajs 5": ("--eval_checkpoint_step",),
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
    "FAKE --actor --save_video": ("--save_video", "--eval_checkpoint_step N", "--eval_n_trajs K"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --eval_arm both --config.agent.candidates 1":
        ("--eval_arm", "both", "agent.candidates", "1"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --checkpoint_path r --ip h": ("--checkpoint_path", "--ip"),
    "FAKE --learner --config.actor.inference=async": ("--config.actor.inference", "async", "actor.clock", "realtime"),
    "FAKE --learner --video_episodes 3": ("--video_episodes", "--eval_n_trajs", "--save_video"),
    "FAKE --learner --sparse": ("--sparse", "FakeAlohaConfig", "reward"),
    "serve FAKE --checkpoint_path run --ip box": ("--checkpoint_path", "--ip"),
    "serve FAKE --checkpoint_path run --bind 0.0.0.0": ("--bind", "--api_key FILE", "--insecure"),
    "serve FAKE --checkpoint_path run --api_key absent --insecure": ("--insecure",),
    "serve FAKE --checkpoint_path run --config.actor.policy=openpi://a:1": ("actor.policy",),
    "report T/a T/b --films 1": ("--films",),
    "record FAKE --out T/out --port 5": ("--port", "--ip"),
    "record FAKE --out T/out --actor_id left": ("--actor_id", "--ip"),
    "record FAKE --out T/out --ip 127.0.0.1 --cameras none --config.agent.image_keys=top": ("--cameras", "top"),
    "data convert T/five --out T/out --to=hdf5 --mode=image": ("--mode", "--to hdf5"),
    "data convert T/five --out T/out --to=lerobot --push_to_hub": ("--push_to_hub", "--repo_id"),
    # values of flags
    "FAKE --learner --seed x": ("--seed", "x"),
    "FAKE --learner --port 70000": ("port", "70000"),
    "FAKE --learner --bind no.such.interface.invalid": ("--bind", "no.such.interface.invalid"),
    "FAKE --actor --ip no-such-host.invalid": ("--ip", "no-such-host.invalid"),
    "FAKE --actor --actor_id a/b": ("--actor_id", "a/b"),
    "FAKE --actor --config.agent.language.tokenizer=bytes":
        ("--config.agent.language.length", "pick the cube", "82", "48"),
    "FAKE --learner --preset no_such": ("no_such", "qc"),
    "FAKE --learner --env_name other": ("--env_name", "FakeAlohaConfig"),
    "FAKE --local --demo_proportion 2 --demo_path T/empty": ("--demo_proportion", "2"),
    "FAKE --local --demo_scores score_5 --demo_path T/empty": ("--demo_scores", "score_5"),
    "FAKE --lerner": ("--lerner", "--learner"),
    "FAKE --learner extra": ("extra", "--config.FIELD=VALUE", "serl-chunk --help_all"),
    "FAKE --learner --port": ("--port", "serl-chunk --help"),
    "serve FAKE --checkpoint_path run --api_key absent": ("--api_key", "absent"),
    "record FAKE --out T/out --cameras top,top": ("--cameras", "top"),
    "keys remove": ("remove", "init", "add", "serl-chunk keys --help"),
    "keys add left --port 65535": ("--port", "65535", "1..65533"),
    "report": ("run", "serl-chunk report --help"),
    "data convert T/five --out T/out --to=zarr": ("--to", "zarr", "hdf5", "lerobot"),
    "data convert T/five --out T/out --to=hdf5 --hz=nan": ("--hz", "nan", "0"),
    "data convert T/five --out T/out --to=hdf5 --episodes 7": ("--episodes", "7", "0..4"),
    "data convert T/five --out T/out --to=hdf5 --episodes ²": ("--episodes", "²"),
    "data convert T/five --out T/out --to=hdf5 --scores score_5=nan": ("--scores", "score_5=nan", "FOLDER=REWARD"),
    # fields of the experiment
    "LOCAL --config.agent.lr=-1": ("--config.agent.lr", "-1"),
    "LOCAL --config.learner.batch_sise=1": ("batch_sise", "batch_size"),
    "LOCAL --config.actor.clock=realtime": ("actor.clock", "lockstep"),
    "LOCAL --config.agent.image_keys=front": ("front", "top"),
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
    "data convert T/five --to hdf5 --out T/five/sub": ("five/sub",),
    "data export T/five --format hdf5 --out T/out --workers 0": ("five", "serl-chunk data convert"),
    "EVALUATE T/other": ("other", "fake_aloha"),
    "EVALUATE T/kept": ("kept", "checkpoint"),
    "EVALUATE T/qc": ("qc", "--preset"),
    "LOCAL --demo_path T/demo.pkl": ("demo.pkl",),
    "FAKE --learner --debug --offline_steps 1 --online_steps 0 --checkpoint_path T/run --dataset_dir T/empty":
        ("empty", "*-val.npz"),
    # other commands
    "record FAKE": ("--out",),
    "record FAKE --out T/out --n_demos 0": ("--n_demos", "0"),
    "record FAKE --out T/file --n_demos 1": ("file", "is a file, expected a folder"),
    "report T/empty": ("empty",),
    "data": ("convert",),
    "data convert T/hdf5": ("--out",),
    "data convert T/hdf5 --from no_such --to hdf5 --out T/out": ("no_such",),
    "keys": ("add",),
    "keys join not-a-token --keys T/keys": ("sc1-",),
    "keys revoke nobody --keys T/keys": ("keys init",),
    "new T/syntax.py": ("syntax.py",),
    "new a-b.py": ("a-b.py",),
    # one command each
    "attention fit T/journal --out T/out --false_alarms 1": ("--false_alarms", "1"),
    "attention fit T/journal T/journal/ --out T/out": ("once",),
    "attention test T/none T/journal": ("T/none", "no such file"),
    "TRAIN --out T/classifier": ("--out", "T/classifier"),
    "TRAIN --frames 0": ("--frames", "0"),
    "TRAIN --false_positives 1.5": ("--false_positives", "1.5"),
    "TRAIN --cameras none": ("--cameras", "none"),
    "TRAIN --exp_name fake_aloha --weights x.npz": ("--weights",),
    "TRAIN --cameras belly": ("belly",),
    "classifier test T/classifier T/five": ("T/classifier",),
    "classifier record FAKE --out T/out --config.robot.image_size=16 --cameras belly": ("belly",),
    "classifier record FAKE --out T/out": ("terminal",),
    "data inspect T/five --max_episodes 0": ("--max_episodes", "0", "1"),
    "data inspect T/five --json /absent/x.json": ("--json", "/absent/x.json"),
    "data inspect T/five --plot /dev/null": ("--plot", "/dev/null"),
    "data stats T/five --actions delta --mask=6,-1": ("delta", "--horizon", "--exp_name"),
    "data stats T/five --mask=6,-1": ("--mask", "--actions delta"),
    "data stats T/five --actions delta --mask=x --horizon 5": ("--mask", "'x'"),
    "data stats T/demos --actions delta --mask=-3 --horizon 5": ("delta", "absolute", "--mask"),
    "data stats T/demos --actions delta --mask=99 --horizon 5": ("--mask", "99", "14", "23"),
    "data stats T/five --std_floor inf": ("--std_floor", "inf"),
    "data stats T/hdf5": ("episode_0.hdf5",),
    "data export T/journal --format hdf5 --out T/out --only interventions": ("--only interventions", "online", "1"),
    "data export T/journal --format hdf5 --out T/out --store demo": ("demos.json",),
    "data export T/journal --format hdf5 --out T/out --mode video": ("--mode", "--to hdf5"),
    "pi0 inspect nothing": ("params/_METADATA",),
    "pi0 import nothing x.npz FAKE": ("agent.policy=pi0",),
    "pi0 export nothing x --exp_name fake_aloha_pi0": ("nothing",),
    "FAKE --actor SERVED --eval_checkpoint_step latest --eval_n_trajs 3": ("--eval_checkpoint_step",),
    "FAKE --actor --config.actor.policy=robot:8000": ("--config.actor.policy",),
    "FAKE --actor --config.actor.policy_key=file": ("--config.actor.policy_key",),
    "record FAKE --out T/out --policy server": ("--policy",),
    "record FAKE --out T/out SERVED0": ("actor.policy",),
    "HUMAN --config.actor.intervention=none": ("--policy", "--config.actor.intervention", "spacemouse"),
    "HUMAN --config.actor.intervention=no_such.npz": ("no_such.npz", "--config.actor.intervention"),
    "record FAKE --out T/out --keep all": ("--keep", "human"),
    "record FAKE --out T/out --policy mine": ("--policy", "mine", "human"),
    "record FAKE --out T/out --viewer 0.0.0.0:80": ("--viewer: must be a port",),
    "record FAKE --out T/out --config.operator.pedal=foot": ("--viewer",),  # of a simulator: for a page alone
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 1 --viewer 0.0.0.0:80": ("--viewer: must be a port",),
    "FAKE --actor --eval_checkpoint_step 500,,best --eval_n_trajs 2 --checkpoint_path run":
        ("--eval_checkpoint_step", "'500,,best'"),
    "robot dry nothing ARMS": ("no such file",),
    "robot dry T/demos ARMS --profile quick": ("first_day",),
    "robot dry T/demos ARMS --lag 0": ("lag",),
    "robot dry T/demos ARMS --hz 20": ("Leave hz out",),
    "robot dry T/demos --file T/one_arm.toml": ("7 joints",),
    "robot replay T/demos --robot 127.0.0.1:9": ("no answer",),
    "view T/five --out T/file": ("--out", "T/file"),
    "view T/five --mcap T/f.mcap": ("--episodes", "5"),
    "view T/five --port 70000": ("--port", "70000"),
    "view T/unjournalled": ("T/unjournalled", "journal"),
    "view T/fresh": ("T/fresh",),
    "view T/badly_labelled": ("labels.json",),
    "view T/five --out a --mcap b": ("--out", "--mcap"),
    "view T/five --size_mb 3": ("--size_mb",),
    "view T/five --episodes 3": ("--episodes",),
    "view T/five --out T/out --size_mb 0.01": ("--size_mb", "0.01"),
    "doctor --config.chunk.horizon=7": ("--exp_name",),
    "doctor --port 65535": ("65535",),
}  # fmt: skip
FAILED = {  # status 1: what was asked for is right, and what it names is not
    "rollback T/kept --to 3",
    "EVALUATE T/kept",
    "LOCAL --demo_path T/torn.hdf5",
    "LOCAL --demo_path T/demo.pkl",
    "FAKE --learner --debug --offline_steps 1 --online_steps 0 --checkpoint_path T/run --dataset_dir T/empty",
    "report T/empty",
    "TRAIN --cameras belly",
    "data stats T/hdf5",
    "pi0 inspect nothing",
    "pi0 export nothing x --exp_name fake_aloha_pi0",
    "robot dry T/demos ARMS --hz 20",
    "robot replay T/demos --robot 127.0.0.1:9",
    "view T/badly_labelled",
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
    shutil.copytree(folder / "five", folder / "badly_labelled")
    (folder / "badly_labelled" / "labels.json").write_text("{")
    (folder / "robot.toml").write_text("x = [1")
    assert run_record(load("fake_aloha", []), 2, str(folder / "demos"), policy="scripted", noise=None, cameras=()) == 0
    with Run(folder / "journal").opened() as run:
        run.feed([coded(0, 8, "success")])
    with Run(folder / "fresh").opened():
        pass
    Run(folder / "unjournalled")
    (folder / "unjournalled" / "run.lock").touch()
    (folder / "experiments").symlink_to(Path("experiments").resolve())
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence_with_a_remedy(line, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", str(files / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    words = [word.replace("T/", f"{files}/") for part in shlex.split(line) for word in WORDS.get(part, [part])]
    status: int | str | None = None
    with contextlib.suppress(SystemExit):
        status = main(words)
    error = capsys.readouterr().err.strip()
    assert status == (1 if line in FAILED else 2), error
    assert "Traceback" not in error
    assert "Errno" not in error
    last = error.splitlines()[-1]
    assert last.startswith("serl-chunk: ")
    assert [part for part in BAD[line] if part.replace("T/", f"{files}/") not in last] == []
    assert not [path for name in ("out*", "new/*.json", "f.mcap") for path in files.glob(name)]
