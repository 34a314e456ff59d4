"""Step `finetune`: train a model for the next item."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finetune(
    model: str,
    state: str,
    place: dict,
    filter_seen: bool,
    refit: str,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    initial: dsl.Input[dsl.Model],
    checkpoint: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Train a model for the next item; resumes by itself."""
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import FinetuneConfig, parse

    values = run(
        "finetune",
        place=place,
        state=Path(state),
        model=model,
        sequences=Path(sequences.path),
        initial=Path(initial.path),
        checkpoint=Path(checkpoint.path),
        filter_seen=filter_seen,
        refit=refit,
        config=parse(FinetuneConfig, config, "finetune"),
    )
    checkpoint.metadata.update(facts(Path(sequences.path), Path(checkpoint.path)))
    log_metrics(metrics, values)
