"""What each command can be told: one frozen dataclass a command, filled from defaults, then a YAML file, then flags."""

from patchproof.config._settings import (
    AttackConfig,
    BenchConfig,
    CertifyConfig,
    DataConfig,
    DemoConfig,
    ExploreConfig,
    ModelConfig,
    PredictConfig,
    ReportConfig,
    TrainConfig,
)
from patchproof.config._sources import CONFIG_BYTES, find_flag, read_config_file, resolved
from patchproof.config._words import parse_batch_size, parse_patches, parse_size

__all__ = [
    "CONFIG_BYTES",
    "AttackConfig",
    "BenchConfig",
    "CertifyConfig",
    "DataConfig",
    "DemoConfig",
    "ExploreConfig",
    "ModelConfig",
    "PredictConfig",
    "ReportConfig",
    "TrainConfig",
    "find_flag",
    "parse_batch_size",
    "parse_patches",
    "parse_size",
    "read_config_file",
    "resolved",
]
