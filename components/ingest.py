"""Step `ingest`: from a published dataset to the canonical tables."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def ingest(
    dataset: str,
    state: str,
    fresh: str,
    config: dict,
    data: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
):
    """Fetch a dataset and read it into the canonical tables; another text in `fresh` bypasses KFP's cache."""
    from pathlib import Path

    from seqrec.artifacts import facts
    from seqrec.cluster.outputs import log_metrics
    from seqrec.config import IngestConfig, parse
    from seqrec.stages.ingest import ingest

    values = ingest(
        dataset=dataset,
        output=Path(data.path),
        downloads=Path(state) / "downloads",
        config=parse(IngestConfig, config, "ingest"),
    )
    data.metadata.update(facts(Path(data.path)))
    log_metrics(metrics, values)
