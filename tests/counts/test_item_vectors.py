"""Vectors of items from counts, against the eigenvectors of a dense matrix."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import OPTIONS, counts_by_loop, make_model, run_pretrain
from torch.nn import functional as F

from seqrec.counts import item_vectors
from seqrec.data import sequences
from seqrec.training import auto_settings
from seqrec.training.checkpoint import load_checkpoint


def information(data):
    """The matrix, one pair of items after the other."""
    counted = counts_by_loop(data, [1 / distance for distance in range(1, 11)])
    matrix = np.zeros_like(counted)
    for one, other in zip(*counted.nonzero(), strict=True):
        share = counted[one, other] * counted.sum() / (counted[one].sum() * counted[:, other].sum())
        matrix[one, other] = max(0.0, np.log(share))
    return matrix + matrix.T


@pytest.mark.parametrize("width", [3, 8])
def test_the_vectors_are_the_largest_eigenvectors(data, width, monkeypatch):
    monkeypatch.setattr(item_vectors, "OVERSAMPLING", len(data.count))  # otherwise they are nearly those
    value, vector = np.linalg.eigh(information(data))
    expected = (vector[:, -width:] * value[-width:].clip(min=0)) @ vector[:, -width:].T

    found = item_vectors.vectors(data, width)

    assert found.shape == (len(data.count), width)
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("sasrec", {"members": 2}), ("bert4rec", {}), ("rec_denoiser", {}), ("gru4rec", {"item_bias": True})],
)
def test_a_table_gets_their_directions_in_rows_three_times_as_long(data, architecture, options):
    unseen = int(data.items.max()) + 1
    data = replace(data, count=F.pad(data.count, (0, 1)))  # an item without events
    model = make_model(architecture, num_items=len(data.count) - 1, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    item_vectors.initialise(model, data, seed=1)

    wanted = F.normalize(item_vectors.vectors(data, 16), dim=1)
    known = wanted.any(1)
    assert known[1:unseen].all()
    assert not known[[0, unseen]].any()
    tables = []
    for name, value in model.state_dict().items():
        if not name.endswith("items.weight"):
            assert torch.equal(value, before[name])
            continue
        table, old = value[: len(known)], before[name][: len(known)]
        torch.testing.assert_close(table[known].norm(dim=1), 3 * old[known].norm(dim=1))
        assert torch.equal(table[~known], old[~known])
        assert torch.equal(value[len(known) :], before[name][len(known) :])  # MASK
        direction = F.normalize(table[known], dim=1)
        torch.testing.assert_close(direction @ direction.T, wanted[known] @ wanted[known].T, atol=1e-5, rtol=1e-5)
        tables.append(direction)
    assert len(tables) == options.get("members", 1)
    assert not any(torch.allclose(tables[0], other, atol=0.1) for other in tables[1:])


def test_a_new_model_starts_with_them_and_a_pre_trained_one_with_its_own(prepared, tmp_path, monkeypatch):
    def initial(model, start):
        options = OPTIONS.get(model, {"length": 8, "d_model": 16})
        folder = tmp_path / model / start
        run_pretrain(model, prepared.parent, folder, options, seed=1, item_vectors=start, epochs=1)
        return load_checkpoint(folder / "initial").model

    random, counted = (initial("sasrec", start) for start in ("random", "counts"))
    item_vectors.initialise(random, sequences.load(prepared), seed=1)
    assert all(torch.equal(value, random.state_dict()[name]) for name, value in counted.state_dict().items())
    monkeypatch.setattr(auto_settings, "RARE", 10**6)
    ruled = initial("sasrec", "auto").state_dict()
    assert all(torch.equal(value, ruled[name]) for name, value in counted.state_dict().items())
    random, counted = (initial("strec", start) for start in ("random", "counts"))
    assert torch.equal(random.items.weight, counted.items.weight)
