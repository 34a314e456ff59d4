"""An ensemble ranks by the mean of its members, each of which is trained as if it were alone."""

import copy

import pytest
import torch
from accelerate import Accelerator
from support import draw_windows, make_batch, make_model

from seqrec.config import FinetuneConfig
from seqrec.data import sequences
from seqrec.training import objectives
from seqrec.training.step import TrainingStep

ROWS = [[3, 7, 2, 9, 4], [5, 1, 8], [6]]


@pytest.mark.parametrize("architecture", ["flash4rec", "strec", "rec_denoiser"])
def test_the_scores_are_the_mean_of_the_members(architecture):
    model = make_model(architecture, members=3).eval()
    batch = make_batch(ROWS)

    together = model(batch, last=True)[:, 0] @ model.item_vectors().T
    alone = [part(batch, last=True)[:, 0] @ part.item_vectors().T for part in model.parts]

    torch.testing.assert_close(together, torch.stack(alone).mean(0), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)


def test_each_member_learns_what_it_would_learn_alone(prepared):
    """Without dropout nothing is drawn in training. One member's gradient is clipped, the other's is not."""
    data = sequences.load(prepared)
    size = {"num_items": data.num_items, "num_users": data.num_users}
    quiet = {"dropout": 0.0, "topk_dropout": 0.0, "jitter": 0.0, "user_dropout": 0.0}
    model = make_model("flash4rec", members=2, **quiet, **size).train()
    with torch.no_grad():
        model.parts[0].items.weight *= 3
    alone = [copy.deepcopy(part) for part in model.parts]
    config = FinetuneConfig(clip_norm=1.1, batch_size=8)
    options, chosen = draw_windows(data, length=12)
    example = objectives.example(data, options, config, chosen, seed=0)
    loss, *losses = (TrainingStep(net, data.count, config, Accelerator(cpu=True))(example) for net in (model, *alone))

    assert losses[0][2] > config.clip_norm > losses[1][2]
    assert float(loss[0]) == pytest.approx(float(losses[0][0] + losses[1][0]) / 2)
    for part, other in zip(model.parts, alone, strict=True):
        for (name, ours), theirs in zip(part.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(2 * ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("architecture", ["recformer", "unisrec", "s3rec", "ssept"])
def test_what_cannot_have_members_says_why(architecture):
    with pytest.raises(ValueError, match="members: "):
        make_model(architecture, members=2)
