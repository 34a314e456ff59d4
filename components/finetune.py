"""Step `finetune`: train a model for the next item."""

from kfp import dsl

from components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finetune(
    model: str,
    state: str,
    filter_seen: bool,
    config: dict,
    sequences: dsl.Input[dsl.Dataset],
    initial: dsl.Input[dsl.Model],
    checkpoint: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
):
    """Train a model for the next item; resumes by itself."""
    from pathlib import Path

    from seqrec.config import FinetuneConfig, parse
    from seqrec.stages.finetune import finetune

    values = finetune(
        model=model,
        sequences=Path(sequences.path),
        initial=Path(initial.path),
        checkpoint=Path(checkpoint.path),
        state=Path(state),
        filter_seen=filter_seen,
        config=parse(FinetuneConfig, config, "finetune"),
    )
    for name, value in values.items():
        metrics.log_metric(name, value)
