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
    from seqrec.artifacts import facts
    from seqrec.cluster.launch import run

    values = run("ingest", dataset=dataset, output=data.path, downloads=f"{state}/downloads", config=config)
    data.metadata.update(facts(data.path))
    metrics.metadata.update(values)
