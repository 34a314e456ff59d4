"""Training from mapped shards is training from memory, bit for bit."""

import pytest
import torch
from support import losses_of, make_model, prepare_rows, run, synthetic_rows, weights

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.training import batches, objectives


@pytest.mark.parametrize(("model", "objective"), [("sasrec", "causal"), ("sasrec", "last"), ("bert4rec", "cloze")])
def test_mapped_equals_resident(tmp_path, model, objective):
    whole = prepare_rows(tmp_path / "whole", synthetic_rows(users=30))
    parts = prepare_rows(tmp_path / "parts", synthetic_rows(users=30), shard_events=150)
    options = {"d_model": 8, "length": 12, "objective": objective}
    settings = {"epochs": 2, "prefixes_per_user": 2, "windows": "all", "options": options}

    run(whole, tmp_path / "one", model, **settings)
    run(parts, tmp_path / "two", model, resident=False, **settings)

    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "two")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("objective", ["causal", "cloze"])
def test_a_process_reads_its_own_part_of_the_file(tmp_path, objective):
    """Together the processes have every window of the step, with its targets; each has a range of the users."""
    data = sequences.load(prepare_rows(tmp_path, synthetic_rows(users=30), shard_events=150))
    options = make_model("sasrec" if objective == "causal" else "bert4rec", objective=objective).options
    config = FinetuneConfig(resident=False)
    step = batches.windows(data, options, config, torch.Generator())
    step = batches.Windows(*(x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))] for x in step))

    whole = objectives.example(data, options, config, step, seed=3)
    parts = [objectives.example(data, options, config, step, seed=3, process=n, processes=3) for n in range(3)]

    order = whole.batch.user.argsort(stable=True)
    assert torch.equal(torch.cat([part.batch.user for part in parts]), whole.batch.user[order])
    assert torch.equal(torch.cat([part.batch.items for part in parts]), whole.batch.items[order])
    assert torch.equal(torch.cat([part.target_BL for part in parts]), whole.target_BL[order])
    assert sum(part.number for part in parts) == whole.number
