"""The names that users import from `serl_chunk`. `__init__.py` reads this table."""

# ruff: noqa: I001 - one statement for each module
from serl_chunk.actor.episode import EpisodeRunner as EpisodeRunner
from serl_chunk.actor.policy import LocalPolicy as LocalPolicy
from serl_chunk.actor.remote_policy import RemotePolicy as RemotePolicy
from serl_chunk.actor.service import ActorService as ActorService
from serl_chunk.agents.base import Agent as Agent
from serl_chunk.agents.registry import make_agent as make_agent, register_agent as register_agent
from serl_chunk.agents.spec import BatchSpec as BatchSpec
from serl_chunk.config.agents.acfql import AcfqlConfig as AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig as AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig as AgentConfig
from serl_chunk.config.agents.bc import BcConfig as BcConfig
from serl_chunk.config.agents.flow import FlowConfig as FlowConfig
from serl_chunk.config.agents.critic import CriticConfig as CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig as EncoderConfig
from serl_chunk.config.experiment import (
    ActorConfig as ActorConfig,
    ChunkConfig as ChunkConfig,
    ExperimentConfig as ExperimentConfig,
    LearnerConfig as LearnerConfig,
    NormaliserConfig as NormaliserConfig,
    ReplayConfig as ReplayConfig,
    RewardConfig as RewardConfig,
    TransportConfig as TransportConfig,
)
from serl_chunk.config.agents.gripper import GripperConfig as GripperConfig
from serl_chunk.config.fields import setting as setting
from serl_chunk.config.loader import load_experiment as load_experiment
from serl_chunk.config.operator import OperatorConfig as OperatorConfig
from serl_chunk.config.outcome import OutcomeConfig as OutcomeConfig
from serl_chunk.config.robots import (
    AlohaConfig as AlohaConfig,
    AlohaSimConfig as AlohaSimConfig,
    FakeAlohaConfig as FakeAlohaConfig,
    FakeSingleArmConfig as FakeSingleArmConfig,
    FrankaConfig as FrankaConfig,
    GymConfig as GymConfig,
    OgbenchConfig as OgbenchConfig,
    RobomimicConfig as RobomimicConfig,
)
from serl_chunk.data.demos import load_demos as load_demos
from serl_chunk.data.paths import open_episodes as open_episodes
from serl_chunk.data.preprocess import fit_preprocess as fit_preprocess
from serl_chunk.evaluation.rollouts import evaluate as evaluate
from serl_chunk.devices.registry import make_intervention as make_intervention
from serl_chunk.learner.trainers.base import Trainer as Trainer
from serl_chunk.models.sums import Loss as Loss, Sum as Sum
from serl_chunk.replay.replay import Replay as Replay
from serl_chunk.robots.base import InterventionSource as InterventionSource
from serl_chunk.robots.base import RobotEnv as RobotEnv
from serl_chunk.robots.registry import make_env as make_env
from serl_chunk.transport.client.link import LearnerLink as LearnerLink
from serl_chunk.transport.server.sessions import ServerHandler as ServerHandler
from serl_chunk.transport.server.server import LearnerServer as LearnerServer
from serl_chunk.types import (
    CameraSpec as CameraSpec,
    Episode as Episode,
    Outcome as Outcome,
    RobotSpec as RobotSpec,
    Snapshot as Snapshot,
    Source as Source,
    StepBlock as StepBlock,
)
