"""All targets by name. Add yours to the list of its subject."""

from fuzz.harness import Target
from fuzz.model_targets import MODELS
from fuzz.reader_targets import READERS
from fuzz.setting_targets import SETTINGS

TARGETS: dict[str, Target] = {target.name: target for target in (*READERS, *SETTINGS, *MODELS)}
