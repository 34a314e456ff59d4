"""Step `join`: no stage; KFP has no input that takes the outputs of several tasks, so sources are handed on."""

from kfp import dsl

from seqrec.components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def join(
    source: str,
    others: dsl.Input[dsl.Dataset],
    data: dsl.Input[dsl.Dataset],
    sequences: dsl.Input[dsl.Dataset],
    joined: dsl.Output[dsl.Dataset],
):
    """Add a dataset that models pre-train on to the dataset itself and the sources before it."""
    import shutil

    unread = shutil.ignore_patterns("raw", "interactions.parquet", "quarantine.parquet")
    shutil.copytree(others.path, joined.path, ignore=unread, dirs_exist_ok=True)
    shutil.copytree(data.path, f"{joined.path}/sources/{source}", ignore=unread)
    shutil.copytree(sequences.path, f"{joined.path}/sources/{source}/sequences")
