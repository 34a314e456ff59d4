"""The drop-ins against dense attention with the mask, projection or choice of queries that they stand for."""

import math

import pytest
import torch
from support import make_batch, make_model
from torch.nn import functional as F

from seqrec.models.efficient_attention import EFFICIENT

B, L, D, H = 3, 13, 16, 2
SIZES = {"linformer": 4, "informer": 1, "longformer": 6, "bigbird": 2, "reformer": 3, "flash": 4, "autoformer": 1}


def build(name, size=None, length=L):
    attention = EFFICIENT[name](D, H, length, size or SIZES[name])
    with torch.no_grad():
        attention.to_query_key_value.weight.normal_(std=0.5)  # uneven attention
        if name == "flash":
            attention.scale.normal_()
            attention.shift.normal_()
    return attention


def projections(attention, x):
    """Return q, k, v (B, H, L, K)."""
    return attention.to_query_key_value(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)


def dense(attention, x, visible):
    """Full attention with a mask that broadcasts to (B, H, L, L)."""
    q, k, v = projections(attention, x)
    logits = (q @ k.mT / math.sqrt(D // H)).masked_fill(~visible, -math.inf)
    return attention.to_out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


def padded(*lengths):
    """Return the mask (B, 1, 1, L) of left-padded sequences."""
    return (torch.arange(L) >= L - torch.tensor(lengths).unsqueeze(1))[:, None, None]


def keys_of(name, size, attention):
    """Return bool (L, L): the keys that a query reads; the last event is read by all and reads all."""
    place = torch.arange(L)
    seen = (place[:, None] - place).abs() <= max(1, size // 2)
    if name == "bigbird":
        for query in range(L):
            drawn = [L - 1 - int(back) for back in attention.drawn[L - 1 - query].nonzero()]
            assert len(drawn) == size
            seen[query, drawn] = True
    seen[-1], seen[:, -1] = True, True
    return seen | (name == "informer")


@pytest.mark.parametrize("mask", [None, padded(13, 7, 1)])
@pytest.mark.parametrize(
    ("name", "size"),
    [("longformer", 1), ("longformer", 5), ("longformer", 6), ("longformer", 40), ("bigbird", 2), ("informer", 50)],
)
def test_it_is_dense_attention_to_some_keys(name, size, mask):
    """Informer reads all of them, as here every query is among the peaked ones."""
    attention, x = build(name, size), torch.randn(B, L, D)
    real = padded(L, L, L) if mask is None else mask

    got, expected = attention(x, x, mask), dense(attention, x, keys_of(name, size, attention) & real)

    torch.testing.assert_close(got[real[:, 0, 0]], expected[real[:, 0, 0]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, padded(13, 7, 1)])
def test_linformer_attends_to_projected_rows(mask):
    attention, x = build("linformer"), torch.randn(B, L, D)
    q, k, v = projections(attention, x)
    projection = attention.projection.expand(B, 1, -1, L) * (1.0 if mask is None else mask.float())
    keys, values = (torch.einsum("bxrl,bhlc->bhrc", projection, rows) for rows in (k, v))
    weights = (torch.einsum("bhqc,bhrc->bhqr", q, keys) / math.sqrt(D // H)).softmax(-1)

    expected = attention.to_out(torch.einsum("bhqr,bhrc->bqhc", weights, values).flatten(2))
    torch.testing.assert_close(attention(x, x, mask), expected, atol=1e-5, rtol=1e-5)


def test_informer_gives_peaked_queries_attention_and_the_others_the_mean():
    attention, x = build("informer"), torch.randn(1, L, D)
    number = math.ceil(math.log(L))  # size 1
    q, k, v = (rows[0] for rows in projections(attention, x))
    sampled = [L - 1 - int(back) for back in attention.order[:number]]
    assert sampled[0] == L - 1
    mixed = torch.empty(L, H, D // H)
    for head in range(H):
        logits = q[head] @ k[head][sampled].T
        peaked = (logits.max(1).values - logits.mean(1)).topk(number).indices.tolist()
        for place in range(L):
            weights = (k[head] @ q[head, place] / math.sqrt(D // H)).softmax(0)
            mixed[place, head] = weights @ v[head] if place in peaked else v[head].mean(0)

    torch.testing.assert_close(attention(x, x, None)[0], attention.to_out(mixed.flatten(1)), atol=1e-5, rtol=1e-5)


def test_reformer_attends_within_buckets_and_to_itself_only_where_alone():
    attention, x = build("reformer", 40), torch.randn(1, L, D)
    q, _, v = (rows[0] for rows in projections(attention, x))
    mixed, alone = torch.empty(L, H, D // H), 0
    for head in range(H):
        projected = [q[head] @ rotation for rotation in attention.rotations]
        buckets = [torch.cat([values, -values], 1).argmax(1).tolist() for values in projected]
        for place in range(L):
            shared = [key for key in range(L) if any(bucket[key] == bucket[place] for bucket in buckets)]
            keys = [key for key in shared if key != place] or [place]
            alone += keys == [place]
            unit = torch.stack([q[head, key] / q[head, key].norm() for key in keys])
            mixed[place, head] = (unit @ q[head, place] / math.sqrt(D // H)).softmax(0) @ v[head, keys]

    torch.testing.assert_close(attention(x, x, None)[0], attention.to_out(mixed.flatten(1)), atol=1e-5, rtol=1e-5)
    assert alone


@pytest.mark.parametrize("mask", [None, padded(13, 7, 1)])
def test_flash_is_squared_relu_attention_in_chunks_and_linear_attention_to_all(mask):
    attention, x = build("flash"), torch.randn(B, L, D)
    width, size = D // H, SIZES["flash"]
    got = attention(x, x, mask)
    for row in range(B):
        first = 0 if mask is None else L - int(mask[row].sum())
        v, gate, shared = F.silu(attention.to_query_key_value(x[row, first:])).split([D, D, width], -1)
        q, k, far_q, far_k = (
            shared * scale + shift for scale, shift in zip(attention.scale, attention.shift, strict=True)
        )
        chunk = [(len(v) - 1 - place) // size for place in range(len(v))]  # counted from the end
        mixed = torch.zeros(len(v), D)
        for query in range(len(v)):
            for key in range(len(v)):
                if chunk[query] == chunk[key]:
                    mixed[query] += torch.relu(q[query] @ k[key] / size) ** 2 * v[key]
                mixed[query] += (far_q[query] @ far_k[key]) / len(v) * v[key]
        expected = attention.to_out(gate * mixed)
        torch.testing.assert_close(got[row, first:], expected, atol=1e-4, rtol=1e-4)


def test_autoformer_sums_values_shifted_by_the_lags_that_correlate_most():
    attention, x = build("autoformer"), torch.randn(B, L, D)
    q, k, v = projections(attention, x)
    number = math.ceil(math.log(L))  # size 1
    mixed = torch.zeros(B, L, H, D // H)
    for row in range(B):
        correlation = torch.stack([(q[row].roll(-lag, 1) * k[row]).sum(1).mean() for lag in range(L)])
        weights, lags = correlation.topk(number)
        for weight, lag in zip(weights.softmax(0), lags.tolist(), strict=True):
            mixed[row] += weight * v[row].roll(-lag, 1).transpose(0, 1)

    torch.testing.assert_close(attention(x, x, None), attention.to_out(mixed.flatten(2)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["linformer", "informer", "longformer"])
def test_no_tensor_is_quadratic_in_the_length(name, monkeypatch):
    n = 97
    attention, x = build(name, size=8, length=n), torch.randn(1, n, D)
    sizes, real = [], F.scaled_dot_product_attention

    def noting(q, k, v, **kwargs):
        sizes.append(q.shape[:-1].numel() * k.shape[-2])
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    attention(x, x, None)

    assert max(sizes) <= H * n * n / 2


@pytest.mark.parametrize("name", sorted(EFFICIENT))
def test_the_backbone_takes_them_at_any_width(name):
    model = make_model("strec", sampling="none", attention=name, attention_size=4).eval()
    batch = make_batch([[3, 7, 2, 9, 4, 8, 1], [5, 1, 8]])
    query = model(batch, last=True)

    assert query.isfinite().all()
    torch.testing.assert_close(query, model(batch)[:, -1:])
    alone = make_batch([[5, 1, 8]])
    if name != "informer":  # the number of peaked queries depends on the width
        torch.testing.assert_close(query[1:], model(alone, last=True), atol=1e-5, rtol=1e-5)
