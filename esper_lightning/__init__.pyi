from esper_lightning.api import grow as grow
from esper_lightning.callbacks import Grow as Grow
from esper_lightning.callbacks import default_callbacks as default_callbacks
from esper_lightning.cli.commands import from_config as from_config
from esper_lightning.cli.commands import report as report
from esper_lightning.datamodules import HostPoolData as HostPoolData
from esper_lightning.envs import ActionConfig as ActionConfig
from esper_lightning.envs import EnvConfig as EnvConfig
from esper_lightning.envs import HostPool as HostPool
from esper_lightning.envs.host_training import HostTraining as HostTraining
from esper_lightning.envs.rewards import RewardConfig as RewardConfig
from esper_lightning.evaluation.checkpoints import load_controller as load_controller
from esper_lightning.evaluation.comparison import EvaluationConfig as EvaluationConfig
from esper_lightning.growth.gates import LifecycleConfig as LifecycleConfig
from esper_lightning.module import TamiyoModule as TamiyoModule
from esper_lightning.ppo.losses import PPOConfig as PPOConfig
from esper_lightning.ppo.policy import PolicyConfig as PolicyConfig

__version__: str
