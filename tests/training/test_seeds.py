"""One seed of a run decides everything random in it; two seeds differ in each part."""

import pytest
import torch
from support import losses_of, run

from seqrec.config import load
from seqrec.stages.pretrain import pretrain
from seqrec.training.checkpoint import load_checkpoint

SEEDS = (1, 2)
ONE_BATCH = {"batch_size": 1000, "epochs": 1}
SAMPLED = {"loss": "sampled_ce", "negatives": 4}


def seeded(folder, seed, **models):
    path = folder / "params.yaml"
    path.write_text(f"seed: {seed}\ndataset: log\ningest: {{source: csv}}\nmodels: {models or {'sasrec': {}}}\n")
    return load(path)


def test_a_runs_seed_is_that_of_both_stages_unless_they_name_one(tmp_path):
    own = {"sasrec": {}, "other": {"architecture": "sasrec", "pretrain": {"seed": 8}, "finetune": {"seed": 9}}}
    params = seeded(tmp_path, 7, **own)

    assert [params.section(stage, model="sasrec").seed for stage in ("pretrain", "finetune")] == [7, 7]
    assert [params.section(stage, model="other").seed for stage in ("pretrain", "finetune")] == [8, 9]
    assert [params.section(stage).seed for stage in ("prepare", "evaluate", "register")] == [42, 42, 42]
    assert params.as_dict()["seed"] == 7


def test_seeds_differ_in_initialisation(prepared, tmp_path):
    weights = []
    for seed in SEEDS:
        params, out = seeded(tmp_path, seed), tmp_path / str(seed)
        shared = {"model": "sasrec", "sequences": prepared, "initial": out, "state": tmp_path, "filter_seen": True}
        pretrain(**shared, architecture=params.model("sasrec"), config=params.section("pretrain", model="sasrec"))
        weights.append(load_checkpoint(out).model.items.weight.detach())

    assert not torch.allclose(*weights)


@pytest.mark.parametrize(
    ("part", "options", "config"),
    [
        ("order", {"dropout": 0.0}, {"epochs": 1}),
        ("dropout", {"dropout": 0.5}, ONE_BATCH),
        ("negatives", {"dropout": 0.0}, ONE_BATCH | SAMPLED),
        ("nothing", {"dropout": 0.0}, ONE_BATCH),
    ],
)
def test_seeds_differ_in_each_random_part_of_training(prepared, tmp_path, part, options, config):
    """From the same weights, and with all other parts taken away."""
    losses = []
    for seed in SEEDS:
        run(prepared, tmp_path / str(seed), options=options, seed=seed, **config)
        losses.append(losses_of(tmp_path / str(seed))[0]["loss"])

    assert (abs(losses[0] - losses[1]) > 1e-5) == (part != "nothing")
