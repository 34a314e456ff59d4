"""Settings: `sections` defines them, `loading` reads and completes params.yaml, `checks` validates it."""

from seqrec.config.checks import ConfigError, Section, parse, require
from seqrec.config.loading import Params, from_dict, load, read_changes
from seqrec.config.ranges import AUTO
from seqrec.config.sections import (
    EXPERIMENT,
    SECTIONS,
    CountsConfig,
    EvaluateConfig,
    FinetuneConfig,
    IngestConfig,
    KubernetesConfig,
    LaunchConfig,
    ModelConfig,
    PrepareConfig,
    PretrainConfig,
    RegisterConfig,
    SearchRange,
    StepResources,
    TrainConfig,
    TuneConfig,
    ValidateConfig,
)
from seqrec.config.serving import ServeConfig
