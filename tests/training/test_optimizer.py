"""The optimisers: which parameters decay, the learning rate of a step, clipping, sparse tables."""

import pytest
import torch
from support import make_batch, make_model

from seqrec.config import FinetuneConfig
from seqrec.models import REGISTRY
from seqrec.training import optimizer
from seqrec.training.objectives import Loss

# last part of the names of what is a matrix and no weight: one row a gain, or probabilities
GAINS = {"flash4rec": {"scale", "shift"}, "rec_denoiser": {"raw_XLL"}}


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (60, 0.5 * (1.0 + 0.2)), (110, 0.2), (500, 0.2)],
)
def test_learning_rate_warms_up_and_falls_as_a_cosine(step, rate):
    config = FinetuneConfig(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)

    assert optimizer.learning_rate(step, 110, config) == pytest.approx(rate)


def test_weight_decay_spares_biases_gains_and_masks(architecture):
    model = make_model(architecture[0])
    decayed, spared = optimizer.Optimizers(model, FinetuneConfig(weight_decay=0.1)).parts[0].param_groups
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    gains = [names[id(p)] for p in spared["params"] if p.ndim > 1]

    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert not [names[id(p)] for p in decayed["params"] if p.ndim == 1]
    assert {name.rpartition(".")[2] for name in gains} == GAINS.get(architecture[0], set())


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *((name, {}) for name in REGISTRY if REGISTRY[name].reads_rows()),
        *(("gru4rec", {"item_bias": True, "attribute_values": words}) for words in (0, 3)),
        ("sasrec", {"members": 2}),
    ],
)
def test_the_first_sparse_step_is_the_dense_one_and_touches_no_other_row(architecture, options):
    """Adam's first step moves a row only where it has a gradient, so both must agree everywhere.

    Gradients are large: beside small ones the two would differ in Adam's epsilon.
    """
    after = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = make_model(architecture, num_items=40, **options)
        model.load_state_dict(after[0] if after else model.state_dict())
        after = after or [{name: value.clone() for name, value in model.state_dict().items()}]
        settings = FinetuneConfig(loss="sampled_ce", sparse_tables=sparse, learning_rate=1e-2)
        optimizers = optimizer.Optimizers(model, settings)
        loss = Loss(settings, torch.ones(41))
        loss.draw = lambda *_: torch.tensor([3, 20, 21])
        for part in model.parts:
            query = part(make_batch([[3, 7, 2, 9], [5, 1, 8]]))[:, -1]
            loss(query, part, torch.tensor([4, 6])).sum().mul(1e6).backward()
        optimizer.clip_gradients(model, 1e5)
        optimizers.step()
        after.append({name: value.clone() for name, value in model.state_dict().items()})

    before, dense, thin = after
    for name in dense:
        torch.testing.assert_close(thin[name], dense[name], atol=1e-6, rtol=1e-5)
    for name in (name for name in thin if name.endswith("items.weight")):
        moved = (thin[name] != before[name]).any(1).nonzero().flatten().tolist()
        assert moved == [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21]


def test_sparse_tables_are_refused_where_they_could_not_help():
    with pytest.raises(ValueError, match=r"sparse_tables .* loss: ce"):
        FinetuneConfig(sparse_tables=True)
    with pytest.raises(ValueError, match="sparse_tables needs weight_decay: 0"):
        FinetuneConfig(sparse_tables=True, loss="bpr", weight_decay=0.1)


def test_the_norm_of_the_gradients_stays_on_their_device():
    with torch.device("meta"):
        model = make_model("sasrec")  # it has no gradients to clip apart
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    assert optimizer.clip_gradients(model, 1.0).device.type == "meta"
