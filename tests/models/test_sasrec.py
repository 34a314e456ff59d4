import torch
from support import make_batch, make_model


def test_attention_equals_torch_multihead_attention():
    """The block against nn.MultiheadAttention, an independent implementation, with the same weights."""
    model = make_model("sasrec", layers=1, heads=2).eval()
    block, batch = model.blocks[0], make_batch([[3, 7, 2, 9, 4]])
    reference = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    attention = block.attention
    with torch.no_grad():
        weights = [part.weight for part in (attention.to_query, attention.to_key, attention.to_value)]
        reference.in_proj_weight.copy_(torch.cat(weights))
        reference.in_proj_bias.zero_()
        reference.out_proj.load_state_dict(attention.to_out.state_dict())

    x = model.items(batch.items) * 4 + model.positions[-5:]  # 4 = sqrt(16)
    query = block.norm_query(x)
    hidden = torch.ones(5, 5).triu(1).bool()
    y = block.norm(query + reference(query, x, x, attn_mask=hidden)[0])
    expected = model.norm(y + block.outer(block.inner(y).relu()))

    torch.testing.assert_close(model(batch), expected, atol=1e-6, rtol=1e-5)


def test_zesrec_is_sasrec_over_mapped_text_vectors():
    model, other = (make_model(name, layers=2, heads=2).eval() for name in ("zesrec", "sasrec"))
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("to_item.")}
    other.load_state_dict(state | {"items.weight": model.text_VX @ model.to_item.weight.T + model.to_item.bias})
    batch = make_batch([[3, 7, 2, 9, 4]])

    torch.testing.assert_close(model(batch), other(batch))
    torch.testing.assert_close(model.item_vectors(), other.item_vectors())
