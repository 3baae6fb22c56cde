"""DPOConfig and its sections: frozen values, validated once on load."""

from thresher.config.dpo import DPOConfig, LossConfig
from thresher.config.load import load_config, parse_config
from thresher.config.roles import (
    DataArgs,
    ModelArgs,
    PolicyConfig,
    ReferenceConfig,
    ReferenceModelArgs,
    TrainingArgs,
    ValidationConfig,
)
from thresher.config.samples import SamplesConfig
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
