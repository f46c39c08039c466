"""Small data sets by other projects' own writers, each in the environment that has the project.

python foreign_writers.py NAME FOLDER        prints the path of the data set
"""

# This file imports nothing of this project, whose versions of packages the others cannot share.

import json
import sys
from pathlib import Path

import numpy as np

EPISODES, STEPS = 3, 40


def lerobot(folder, state, size=64):
    """LeRobot's own writer. `state`: name -> length of the parts of a state."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {name: {"dtype": "float32", "shape": (n,), "names": None} for name, n in state.items()}
    features["actions"] = {"dtype": "float32", "shape": (7,), "names": ["action"]}
    for camera in ("image", "wrist_image"):
        features[camera] = {"dtype": "image", "shape": (size, size, 3), "names": ["height", "width", "channel"]}
    data = LeRobotDataset.create("user/set", fps=10, features=features, root=folder / "set", use_videos=False)
    rng = np.random.default_rng(0)
    for _ in range(EPISODES):
        for _ in range(STEPS):
            frame = {name: rng.uniform(-1, 1, about["shape"]).astype("float32") for name, about in features.items()}
            frame |= {c: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for c in ("image", "wrist_image")}
            data.add_frame(frame | {"task": "move"})
        data.save_episode()
    if hasattr(data, "finalize"):
        data.finalize()
    return folder / "set"


def openpi(folder):
    """The features of openpi's conversions."""
    return lerobot(folder, {"state": 8})


def parts(folder):
    """A state in two features."""
    return lerobot(folder, {"observation.states.joint.position": 6, "observation.states.effector.position": 1})


def minari(folder, name="Pendulum-v1"):
    """Minari's collector around an environment of Gymnasium's."""
    import os

    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    import gymnasium
    from minari import DataCollector

    env = DataCollector(gymnasium.make(name, max_episode_steps=STEPS))
    for seed in range(EPISODES):
        env.reset(seed=seed)
        while True:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                break
    env.create_dataset("set/random-v0")
    return folder / "set" / "random-v0"


def goals(folder):
    """The same of observations with a goal, by Gymnasium-Robotics."""
    import gymnasium
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return minari(folder, "FetchReach-v4")


def robosuite_env():
    import robosuite

    return robosuite.make("Lift", robots="Panda", has_renderer=False, has_offscreen_renderer=False,
                          use_camera_obs=False, horizon=STEPS)  # fmt: skip


def robomimic(folder):
    """robosuite's collection, and robomimic's own conversion to observations."""
    import h5py

    sys.modules["mujoco_py"] = type(sys)("mujoco_py")  # the last release looks for it, and uses what robosuite has
    import robomimic.scripts.dataset_states_to_obs as convert
    from robosuite.wrappers import DataCollectionWrapper

    env, actions = DataCollectionWrapper(robosuite_env(), str(folder / "raw")), []
    for i in range(EPISODES):
        env.reset()
        actions.append(np.random.default_rng(i).uniform(-1, 1, (STEPS, env.action_dim)))
        for action in actions[-1]:
            env.step(action)
    env.close()
    path = folder / "demo.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_version": "1.5", "env_kwargs": {
            "robots": "Panda", "has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False,
            "control_freq": 20}})  # fmt: skip
        for i, episode in enumerate(sorted((folder / "raw").iterdir())):
            demo = data.create_group(f"demo_{i}")
            demo.attrs["model_file"] = (episode / "model.xml").read_text()
            # As its own scripts do: the last state was seen after the last action.
            states = [np.load(part)["states"] for part in sorted(episode.glob("state_*.npz"))]
            demo["states"], demo["actions"] = np.concatenate(states)[:-1], actions[i]
    convert.dataset_states_to_obs(convert_arguments(path))
    return folder / "low_dim.hdf5"


def convert_arguments(path):
    import argparse

    return argparse.Namespace(
        dataset=str(path), output_name="low_dim.hdf5", n=None, shaped=False, camera_names=[], camera_height=84,
        camera_width=84, depth=False, done_mode=2, copy_rewards=False, copy_dones=False, exclude_next_obs=False,
        compress=False, num_workers=1, add_datagen_info=False, generative_textures=False, randomize_cameras=False,
        include_next_obs=True,
    )  # fmt: skip


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    writers = {"openpi": openpi, "parts": parts, "minari": minari, "goals": goals, "robomimic": robomimic}
    print(writers[name](Path(folder).resolve()))
