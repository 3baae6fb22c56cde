"""DPOConfig and its sections: frozen values, validated once on load."""

from thresher.config.data import DataArgs, SamplesConfig, ValidationConfig
from thresher.config.dpo import DPOConfig
from thresher.config.load import load_config, parse_config
from thresher.config.loss import LossConfig
from thresher.config.roles import ModelArgs, PolicyConfig, ReferenceConfig, ReferenceModelArgs, TrainingArgs
from thresher.config.strategies import StrategyArgs

__all__ = [
    "DPOConfig",
    "DataArgs",
    "LossConfig",
    "ModelArgs",
    "PolicyConfig",
    "ReferenceConfig",
    "ReferenceModelArgs",
    "SamplesConfig",
    "StrategyArgs",
    "TrainingArgs",
    "ValidationConfig",
    "load_config",
    "parse_config",
]
