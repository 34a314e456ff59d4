import torch
from equations import torch_layer
from support import make_batch, make_model
from torch.nn import functional as F

MASK = 31  # make_model has 30 items


def test_scores_equal_torch_encoder_layers_and_the_head_of_the_paper():
    model = make_model("bert4rec", layers=2).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    batch = make_batch([[3, MASK, 2, 9, MASK], [5, 1, MASK]])

    scores = model(batch) @ model.item_vectors().T

    x = F.layer_norm(model.items.weight[batch.items] + model.positions[-5:], (16,), model.norm.weight, model.norm.bias)
    for block in model.blocks:
        x = torch_layer(block)(x, src_key_padding_mask=batch.items == 0)
    dense, norm = model.head[0], model.head[2]
    x = F.layer_norm(F.gelu(x @ dense.weight.T + dense.bias), (16,), norm.weight, norm.bias)
    expected = x @ model.items.weight[:31].T + model.bias  # padding and 30 items; MASK is not a candidate
    torch.testing.assert_close(scores[batch.items == MASK], expected[batch.items == MASK], atol=1e-4, rtol=1e-4)
