"""Step `champion`: no stage; fetches what a retraining starts from."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def champion(dataset: str, config: dict, weights: dsl.Output[dsl.Model]):
    """Fetch the champion from the registry; without one the folder is empty."""
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.config import RegisterConfig, parse
    from seqrec.tracking.registry import fetch_champion

    version = fetch_champion(
        dataset=dataset, folder=Path(weights.path), config=parse(RegisterConfig, config, "register")
    )
    weights.metadata.update(facts(weights.path), version=version)
