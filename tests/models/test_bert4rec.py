import pytest
import torch
from support import make_batch, make_model
from torch import nn
from torch.nn import functional as F

MASK = 31  # make_model has 30 items


def reference_layer(block) -> nn.TransformerEncoderLayer:
    """torch's own post-norm layer with the weights of `block`."""
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, activation="gelu", batch_first=True).eval()
    attention = block.attention
    parts = (attention.to_query, attention.to_key, attention.to_value)
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    layer.self_attn.out_proj.load_state_dict(attention.to_out.state_dict())
    for name, part in (("linear1", block.inner), ("linear2", block.outer), ("norm2", block.norm)):
        getattr(layer, name).load_state_dict(part.state_dict())
    layer.norm1.load_state_dict(block.norm_attention.state_dict())
    return layer


def test_scores_equal_torch_encoder_layers_and_the_head_of_the_paper():
    model = make_model("bert4rec", layers=2).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    batch = make_batch([[3, MASK, 2, 9, MASK], [5, 1, MASK]])

    scores = model(batch) @ model.item_vectors().T

    x = F.layer_norm(model.items.weight[batch.items] + model.positions[-5:], (16,), model.norm.weight, model.norm.bias)
    for block in model.blocks:
        x = reference_layer(block)(x, src_key_padding_mask=batch.items == 0)
    dense, norm = model.head[0], model.head[2]
    x = F.layer_norm(F.gelu(x @ dense.weight.T + dense.bias), (16,), norm.weight, norm.bias)
    expected = x @ model.items.weight[:31].T + model.bias
    torch.testing.assert_close(scores[batch.items == MASK], expected[batch.items == MASK], atol=1e-4, rtol=1e-4)


def test_the_mask_is_no_candidate():
    assert len(make_model("bert4rec").item_vectors()) == 31  # padding and 30 items


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads"):
        make_model("bert4rec", heads=3)
