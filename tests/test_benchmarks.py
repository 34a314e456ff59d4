"""The contestants of benchmarks/peers.py get the same data, and none may recommend what a user has seen."""

import numpy as np
import torch

from benchmarks import ours, peer_data, peers
from seqrec.data import sequences

SETTINGS = {**peers.SETTINGS, "length": 15, "d_model": 8, "batch_size": 4}  # longer than some users' train events


def test_ours_and_the_peers_train_on_the_same_windows(prepared):
    data, histories = ours.load(prepared, 30), peer_data.read(prepared, 30)
    user = torch.arange(data.num_users)

    for stop, ours_stop in ((histories.train_stop, data.train_stop), (histories.valid_stop, data.valid_stop)):
        expected = sequences.window(data, user, ours_stop, 20).items
        np.testing.assert_array_equal(histories.windows(stop, 20), expected.numpy())
    assert histories.num_items == data.num_items

    model = ours.model_of(data, SETTINGS)
    figures = ours.train(model, data, SETTINGS, "fp32")
    ranked, lists = ours.rank(model, data, SETTINGS)

    assert figures["targets"] == (histories.windows(histories.train_stop, 16) > 0).sum() - 30  # the first is no target
    assert np.isfinite(figures["loss"])
    assert ranked["ranked"] == 30
    histories.check_unseen(lists.numpy())
