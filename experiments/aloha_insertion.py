"""gym-aloha's Insertion in MuJoCo: the right arm's peg goes into the socket that the left arm holds.

pip install 'serl-chunk[aloha-sim]'
serl-chunk record --exp_name aloha_insertion --policy scripted --noise 0.003 --n_demos 30 --out demos/insertion
serl-chunk --exp_name aloha_insertion --learner --actor --demo_path demos/insertion --checkpoint_path runs/insertion
"""

from dataclasses import replace

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import AlohaSimConfig


def experiment() -> ExperimentConfig:
    """State observations (joints, poses of peg and socket); TransferCube's settings, not tuned for this task."""
    base = load_experiment("aloha_transfer_cube")
    return replace(base, name="aloha_insertion", robot=AlohaSimConfig(env_name="insertion"))
