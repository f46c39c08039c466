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
import types

import gymnasium

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig


def make(fake_env):
    {body}


def experiment():
    return ExperimentConfig("mine", GymConfig(make=make, robot_name="mine", control_hz=20, max_episode_steps=100))
"""
BREAKS = (
    EXPERIMENT.format(body="return Arm()")
    + """

class Arm(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,))
    ticks = 0

    def reset(self, *, seed=None, options=None):
        {reset}
        return self.observation_space.sample(), {{}}

    def step(self, action):
        self.ticks += 1
        if self.ticks == 105:
            {step}
        return self.observation_space.sample(), 0.0, False, False, {{}}

    def close(self):
        open("/dev/gripper9")

    def make_expert(self):
        return types.SimpleNamespace(reset=id, act=self.action_space.sample)
"""
)
FILES = {
    "torn.hdf5": "this is no HDF5 file",
    "make_raises.py": EXPERIMENT.format(body="raise RuntimeError('the camera is not connected')"),
    "step.py": BREAKS.format(reset="", step="open('/dev/gripper0')").replace("        \n", ""),
    "pipe.py": BREAKS.format(reset="raise BrokenPipeError(32, 'Broken pipe')", step="pass"),
    "file": "",
    "empty/": "",
    "hdf5/episode_0.hdf5": "torn",
    "swept/sweep.json": json.dumps({"seeds": [1], "grid": {}, "flags": [], "runs": {}}),
    "newer/config.json": json.dumps({"format": 999, "name": "fake_aloha"}),
    "older/config.json": json.dumps({"format": 2, "name": "fake_aloha", "serl_chunk": {"version": "0.0.9"}}),
    "kept/config.json": json.dumps({"format": FORMAT, "name": "fake_aloha"}),
    "other/config.json": json.dumps({"format": FORMAT, "name": "other"}),
    "qc/config.json": json.dumps({"format": FORMAT, "name": "fake_aloha", "preset": "qc", "compat": ""}),
    "one_arm.toml": 'name = "one"\n[driver]\nname = "fake"\narms = 1\n',
    "weights.npz": "no archive",
    "classifier/classifier.json": "{}",
}
FAKE = ["--exp_name", "fake_aloha"]
WORDS = {
    "FAKE": FAKE,
    "LOCAL": [*FAKE, "--local", "--debug"],
    "BOTH": [*FAKE, "--learner", "--actor", "--actors"],
    "SERVED": ["--config.actor.policy=openpi://127.0.0.1:8123"],
    "SCRIPT": ["record", "--out", "T/recorded", "--policy", "scripted", "--n_demos", "1", "--exp_name"],
    "HUMAN": ["record", *FAKE, "--out", "T/out", "--policy", "human"],
    "DRIVE": ["teleoperate", *FAKE],
    "TRAIN": ["classifier", "train", "T/five", "--cameras", "a", "--out", "T/new"],
    "ARMS": ["--file", "experiments/robots/fake_aloha.toml"],
    "EVALUATE": [*FAKE, "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "1", "--checkpoint_path"],
}
# command line (with WORDS; T/ is a folder with FILES, and five episodes in T/five) -> what the sentence must contain
BAD: dict[str, tuple[str, ...]] = {
    # which command, which experiment
    "zzz": ("zzz", "record"),
    "serv": ("Did you mean serl-chunk serve?",),
    "experiment": ("Did you mean serl-chunk experiments?",),
    "trian": ("Did you mean serl-chunk --exp_name NAME --learner",),
    "train": ("Did you mean serl-chunk --exp_name NAME --learner",),
    "inspect T/five": ("Did you mean serl-chunk data inspect?",),
    "FAKE": ("--learner", "--actor", "--local"),
    "--learner": ("--exp_name", "fake_aloha"),
    "--exp_name fake_alhoa --learner": ("fake_alhoa", "fake_aloha"),
    "--exp_name T/make_raises.py --local --debug": ("make_raises.py:10", "the camera is not connected"),
    "SCRIPT T/step.py": ("step.py:27, in Arm.step: FileNotFoundError: No such", "/dev/gripper0",
                         "tick 4 of episode demo-mine-000001. The trace is in", ".log"),
    "SCRIPT T/pipe.py": ("pipe.py:22, in Arm.reset: BrokenPipeError: Broken pipe", "before tick 0 of episode", ".log"),
    "rollback T/kept --to 3": ("--to", "version 3", "kept", "no version has a checkpoint", "new run"),
    "check-policy T/other": ("--exp_name", "other", ".py"),
    "check-policy T/kept --demo_path T/none": ("T/none", "no such file or folder"),
    "check-policy T/kept": ("T/kept", "--demo_path"),
    "report T/kept T/qc --episodes 2": ("--episodes", "one run"),
    "report T/kept --episodes -1": ("--episodes", "0 or more"),
    "EVALUATE T/kept --save_video -1": ("--save_video", "-1"),
    "record --out T/out": ("--exp_name", "fake_aloha", ".py"),
    "serve FAKE": ("--checkpoint_path: give it", "--ip"),
    "serve FAKE --checkpoint_path a --ip b": ("--ip: names a policy", "Remove one"),
    "doctor --timeout 1": ("unknown argument '--timeout'", "--help_all"),
    "robot dry T/five": ("serl-chunk: robot.toml: no TOML file",),
    "FAKE --actor --config.actor.intervention=telepathy":
        ("--config.actor.intervention", "telepathy", "spacemouse"),
    "config fake_aloha agent.crtic": ("agent.crtic", "Did you mean agent.critic?"),
    "FAKE --learner --n_envs 4": ("--n_envs", "own evaluations", "--eval_interval"),
    "FAKE --learner --eval_interval 5 --n_envs 0": ("--n_envs", "at least 1", "0"),
    "EVALUATE T/kept --n_envs 4 --viewer 0": ("--n_envs", "--viewer", "Remove it"),
    "LOCAL --n_envs 0": ("--n_envs", "at least 1", "0"),
    "LOCAL --n_envs 3000000": ("--n_envs", "3000000", "of memory are left"),
    "FAKE --actor --n_envs 2 --viewer 0": ("--n_envs", "--viewer", "Remove it"),
    "FAKE --actor --n_envs 2 --config.actor.clock=realtime": ("--n_envs", "actor.clock=lockstep"),
    "FAKE --actor --n_envs 2 --config.actor.intervention=spacemouse": ("--n_envs", "spacemouse", "scripted"),
    "FAKE --actor --n_envs 2 --config.actor.max_human_ticks=9": ("--n_envs", "actor.max_human_ticks"),
    "FAKE SERVED --actor --n_envs 2": ("--n_envs", "openpi://127.0.0.1:8123", "Remove one"),
    "--exp_name aloha --actor --n_envs 2 --config.robot.server=pc": ("--n_envs", "is real", "an --actor for each"),
    "FAKE --actor --undone_by fake_aloha_images@gpu": ("--undone_by", "NAME@HOST:PORT", "fake_aloha_images@gpu"),
    "FAKE --actor --undone_by fake_aloha_images@gpu:7000 --n_envs 2": ("--n_envs", "2", "1"),
    "FAKE --actor --undone_by fake_single_arm@gpu:7000": ("robot", "fake_aloha", "fake_single_arm"),
    "FAKE --learner --undone_by fake_aloha@gpu:7000": ("--undone_by", "--learner"),
    # flags that exclude or need one another
    "FAKE --local --learner": ("--local", "--learner"),
    "FAKE --actor --demo_path T/empty": ("--demo_path", "--actor"),
    "FAKE --actor --eval_n_trajs 5": ("--eval_checkpoint_step",),
    "FAKE --learner --keys T/empty --insecure": ("--keys", "--insecure"),
    "FAKE --learner --online_steps 0 --bind 0.0.0.0": ("--bind", "--online_steps"),
    "FAKE --learner --actor --eval_checkpoint_step 5 --eval_n_trajs 2":
        ("evaluation", "--actor", "--learner", "--local"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --eval_arm both --config.agent.candidates 1":
        ("--eval_arm", "both", "agent.candidates", "1"),
    "FAKE --actor --eval_checkpoint_step 5,9 --eval_n_trajs 2 --eval_until_decided --n_envs 4": ("--n_envs", "4", "1"),
    "FAKE --actor --eval_checkpoint_step 5 --eval_n_trajs 2 --checkpoint_path r --ip h": ("--checkpoint_path", "--ip"),
    "FAKE --learner --config.actor.inference=async": ("--config.actor.inference", "async", "actor.clock", "realtime"),
    "FAKE --learner --sparse": ("--sparse", "FakeAlohaConfig", "reward"),
    "serve FAKE --checkpoint_path run --bind 0.0.0.0": ("--bind", "--api_key FILE", "--insecure"),
    "serve FAKE --checkpoint_path run --config.actor.policy=openpi://a:1": ("actor.policy",),
    "record FAKE --out T/out --ip 127.0.0.1 --cameras none --config.agent.image_keys=top": ("--cameras", "top"),
    "data convert T/five --out T/out --to=lerobot --push_to_hub": ("--push_to_hub", "--repo_id"),
    "FAKE --actor --actors 2": ("--actors", "has no effect with --actor", "--learner --actor"),
    "BOTH 2 --config.robot.server=127.0.0.1": ("--actors", "same robot", "2", "--actor_id"),
    "BOTH 3 --config.actor.clock=realtime": ("--actors", "3", "--config.actor.clock=lockstep"),
    "BOTH 2 --config.actor.intervention=gamepad": ("--actors", "one gamepad", "--config.actor.intervention=none"),
    "FAKE --learner --run_page 0.0.0.0:80": ("--run_page: must be a port", "Give a port"),
    "FAKE --actor --run_page 8090": ("--run_page", "--learner"),
    "BOTH 2 --viewer 8000": ("--viewer", "8000", "Give 0"),
    # sweeps
    "sweep --seeds 5-1 --out T/out -- LOCAL": ("--seeds", "5-1", "as 1-5"),
    "sweep --seeds 1 --grid agent.lr=1e-4,, --out T/out -- LOCAL": ("--grid", "agent.lr=1e-4,,", "none of them empty"),
    "sweep --seeds 1 --grid agent.lrr=1 --out T/out -- LOCAL": ("--config.agent.lrr", "has no field 'lrr'", "'lr'"),
    "sweep --seeds 1-2 --out T/swept -- LOCAL":
        ("--out", "T/swept holds another sweep (seeds: [1] -> [1, 2]", "Choose another folder"),
    "sweep --seeds 1 --out T/out -- LOCAL --seed 3": ("--seed", "Remove it behind the --"),
    "sweep --seeds 1 --out T/out -- FAKE --learner": ("--learner", "--local", "--online_steps 0"),
    "sweep --seeds 1 --out T/out --jobs 0 -- LOCAL": ("--jobs", "at least 1", "0"),
    "sweep --seeds 1 --out T/out --slurm a=1 -- LOCAL": ("--slurm", "--engine local"),
    "report T/swept --films 1": ("--films", "one run"),
    # values of flags
    "BOTH 0": ("--actors", "at least 1", "0"),
    "FAKE --learner --seed x": ("--seed", "x"),
    "FAKE --learner --port 70000": ("port", "70000"),
    "FAKE --learner --bind no.such.interface.invalid": ("--bind", "no.such.interface.invalid"),
    "FAKE --actor --ip no-such-host.invalid": ("--ip: no such host: 'no-such-host.invalid'",),
    "EVALUATE T/kept --config.actor.policy=openpi://no-such-host.invalid": ("--eval_checkpoint_step",),
    "record FAKE --out T/out --policy server --config.actor.policy=openpi://no-such-host.invalid:1":
        ("--config.actor.policy: no such host: 'no-such-host.invalid'",),
    "robot replay T/demos --robot no-such-host.invalid": ("no such host: 'no-such-host.invalid'",),
    "FAKE --actor --timeout 5": ("--timeout", "actor.policy"),
    "FAKE --actor --actor_id a/b": ("--actor_id", "a/b"),
    "FAKE --actor --config.agent.language.tokenizer=bytes":
        ("--config.agent.language.length", "pick the cube", "82", "48"),
    "FAKE --learner --preset no_such": ("no_such", "qc"),
    "FAKE --local --demo_proportion 2 --demo_path T/empty": ("--demo_proportion", "2"),
    "FAKE --local --demo_tolerance_s 0 --demo_path T/empty": ("--demo_tolerance_s", "0"),
    "FAKE --local --demo_scores score_5 --demo_path T/empty": ("--demo_scores", "score_5"),
    "FAKE --learner extra": ("extra", "--config.FIELD=VALUE", "serl-chunk --help_all"),
    "keys add left --port 65536": ("--port", "65536", "1..65535"),
    "data convert T/five --out T/out --to=hdf5 --episodes 7": ("--episodes", "7", "0..4"),
    "data convert T/five --out T/out --to=hdf5 --scores score_5=nan": ("--scores", "score_5=nan", "FOLDER=REWARD"),
    # fields of the experiment
    "LOCAL --config.agent.lr=-1": ("--config.agent.lr", "-1"),
    "LOCAL --config.learner.batch_sise=1": ("batch_sise", "batch_size"),
    "LOCAL --config.agent.image_keys=front": ("front", "top"),
    "LOCAL --utd_ratio 1 --config.learner.utd_ratio=2": ("--utd_ratio", "--config.learner.utd_ratio"),
    # files
    "LOCAL --demo_path T/torn.hdf5": ("torn.hdf5",),
    "LOCAL --demo_path T/torn.hdf5 --demo_skip_bad": ("no demonstration is whole", "torn.hdf5"),
    "data repair T/journal --out T/out": ("format run", "data convert"),
    "LOCAL --checkpoint_path T/file": ("file", "is a file, expected a folder"),
    "LOCAL --checkpoint_path T/newer": ("config.json", "999", "start a new run"),
    "LOCAL --checkpoint_path T/older": ("config.json", "2", "serl_chunk 0.0.9", "start a new run"),
    "data convert T/five --to hdf5 --out T/five/sub": ("five/sub",),
    "data export T/five --format hdf5 --out T/out --workers 0": ("five", "serl-chunk data convert"),
    "EVALUATE T/other": ("other", "fake_aloha"),
    "EVALUATE T/kept": ("kept", "checkpoint"),
    "FAKE --learner --debug --offline_steps 1 --online_steps 0 --checkpoint_path T/run --dataset_dir T/empty":
        ("empty", "*-val.npz"),
    # other commands
    "record FAKE": ("--out",),
    "data convert T/hdf5": ("--out",),
    "data inspect T/empty": ("--from: T/empty: a folder of no known format (it has: nothing)", "episodes"),
    "FAKE --local --demo_path T/empty": ("--demo_format: T/empty: a folder of no known format",),
    "FAKE --local --demo_path T/none": ("--demo_path: T/none: no such file or folder",),
    "FAKE --local --demo_path T/weights.npz": ("--demo_format: T/weights.npz", "no known format"),
    "FAKE --local --demo_path T/five/episode_0.hdf5 T/five/episode_1.hdf5": ("episode_1", "quote a pattern"),
    "data check T/nothing*": ("nothing matches this pattern",),
    "view user/absent": ("user/absent", "hf download user/absent"),
    "robot dry T/demos --file T/robot.toml.txt": ("--file: T/robot.toml.txt: no such file",),
    "keys join not-a-token --keys T/keys": ("sc1-",),
    "new a-b.py": ("a-b.py",),
    # one command each
    "attention fit T/journal --out T/out --false_alarms 1": ("--false_alarms", "1"),
    "attention test T/none T/journal": ("T/none", "no such file"),
    "TRAIN --cameras none": ("--cameras", "none"),
    "TRAIN --cameras belly": ("belly",),
    "classifier test T/classifier T/five": ("T/classifier",),
    "classifier record FAKE --out T/out": ("terminal",),
    "data inspect T/five --plot /dev/null": ("--plot", "/dev/null"),
    "data stats T/five --actions delta --mask=6,-1": ("delta", "--horizon", "--exp_name"),
    "data stats T/demos --actions delta --mask=-3 --horizon 5": ("delta", "absolute", "--mask"),
    "data stats T/hdf5": ("episode_0.hdf5",),
    "data export T/journal --format hdf5 --out T/out --only interventions": ("--only interventions", "online", "1"),
    "data export T/journal --format hdf5 --out T/out --store demo": ("demos.json",),
    "pi0 inspect nothing": ("params/_METADATA",),
    "FAKE --actor --config.actor.policy=robot:8000": ("--config.actor.policy",),
    "HUMAN --config.actor.intervention=none": ("--policy", "--config.actor.intervention", "spacemouse"),
    "DRIVE --config.actor.intervention=none": ("--config.actor.intervention", "spacemouse", "--viewer"),
    "DRIVE": ("terminal", "--viewer"),
    "DRIVE --preset qc": ("--preset", "qc", "Remove it"),
    "DRIVE --compat qc": ("--compat", "qc", "Remove it"),
    "DRIVE --horizon_length 5": ("--horizon_length", "5", "Remove it"),
    "DRIVE SERVED": ("--config.actor.policy", "openpi://127.0.0.1:8123", "Remove it"),
    "DRIVE --policy server": ("'--policy'",),
    "DRIVE --out T/out": ("'--out'",),
    "DRIVE --cameras top,top": ("--cameras", "top"),
    "record FAKE --out T/out --keep all": ("--keep", "human"),
    "record FAKE --out T/out --viewer 0.0.0.0:80": ("--viewer: must be a port",),
    "record FAKE --out T/out --config.operator.pedal=foot": ("--viewer",),  # of a simulator: for a page alone
    "FAKE --actor --eval_checkpoint_step 500,,best --eval_n_trajs 2 --checkpoint_path run":
        ("--eval_checkpoint_step", "'500,,best'"),
    "FAKE --actor --keys T/none": ("--keys", "T/none", "serl-chunk keys add NAME"),
    "robot dry nothing ARMS": ("no such file",),
    "robot dry T/demos ARMS --profile quick": ("first_day",),
    "robot dry T/demos ARMS --hz 20": ("Leave hz out",),
    "robot replay T/demos --robot 127.0.0.1:9": ("no answer",),
    "view T/five --mcap T/f.mcap": ("--episodes", "5"),
    "view T/fresh": ("T/fresh",),
    "view T/badly_labelled": ("labels.json",),
    "view T/five --out T/out --size_mb 0.01": ("--size_mb", "0.01"),
    "EVALUATE T/qc": ("qc", "--preset"),
    "record FAKE --out T/out --policy server": ("--policy",),
    "record FAKE --out T/out --n_envs 2": ("--n_envs", "--policy=scripted"),
    "record FAKE --out T/out --cameras top,top": ("--cameras", "top"),
    "data convert T/five --out T/out --to=hdf5 --episodes ²": ("--episodes", "²"),
    "TRAIN --exp_name fake_aloha --weights x.npz": ("--weights",),
    "data export T/journal --format hdf5 --out T/out --mode video": ("--mode", "--to hdf5"),
    "LOCAL --config.preset=qc": ("preset", "--preset"),
    "data stats T/five --mask=6,-1": ("--mask", "--actions delta"),
    "view T/five --out a --mcap b": ("--out", "--mcap"),
    "robot dry T/demos --file T/one_arm.toml": ("7 joints",),
    "FAKE --actor SERVED --eval_checkpoint_step latest --eval_n_trajs 3": ("--eval_checkpoint_step",),
    "example T/five": ("T/five exists", "Give a folder"),
    "example T/file/run": ("T/file/run", "Choose another folder"),
    "keys remove": ("remove", "init", "add", "serl-chunk keys --help"),
    "TRAIN --out T/classifier": ("--out", "T/classifier"),
    "pi0 import nothing x.npz FAKE": ("agent.policy=pi0",),
    "memory": ("--exp_name",),
    "memory FAKE --devices 3": ("learner.batch_size", "3 devices", "252 or 258"),
    "memory FAKE --devices 0": ("--devices", "0"),
    "memory FAKE --device_memory 0": ("--device_memory", "0"),
    "pi0 export T/journal T/out --exp_name fake_aloha_pi0 --merge_lora": ("--merge_lora", "has no LoRA"),
    "attention fit T/journal T/journal/ --out T/out": ("once",),
    "doctor --config.chunk.horizon=7": ("--exp_name",),
    "data merge T/five T/demos --out T/five/sub": ("five/sub",),
    "data merge T/five T/demos --out T/badly_labelled": ("other files", "new folder"),
    "data merge T/five --out T/out --mode video": ("--mode", "Remove it"),
    "data rename-task T/five lift cut": ("'lift'", "''", "Give one of these"),
    "data rename-task T/journal lift cut": ("format run", "--to hdf5"),
}  # fmt: skip
FAILED = {  # status 1: what was asked for is right, and what it names is not
    "SCRIPT T/step.py",
    "SCRIPT T/pipe.py",
    "rollback T/kept --to 3",
    "EVALUATE T/kept",
    "LOCAL --demo_path T/torn.hdf5",
    "LOCAL --demo_path T/torn.hdf5 --demo_skip_bad",
    "FAKE --learner --debug --offline_steps 1 --online_steps 0 --checkpoint_path T/run --dataset_dir T/empty",
    "TRAIN --cameras belly",
    "data stats T/hdf5",
    "pi0 inspect nothing",
    "robot dry T/demos ARMS --hz 20",
    "robot replay T/demos --robot 127.0.0.1:9",
    "robot replay T/demos --robot no-such-host.invalid",
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
    (folder / "experiments").symlink_to(Path("experiments").resolve())
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence_with_a_remedy(line, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", str(files / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(files))
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
    assert all("Traceback" in log.read_text() for log in files.glob("serl-chunk-*.log"))
    assert not [path for name in ("out*", "new/*.json", "f.mcap") for path in files.glob(name)]
