"""Parameters in tables, and operations of a query, against sums by hand."""

import pytest
from support import make_model

from seqrec.evaluation import cost


@pytest.mark.parametrize(("architecture", "rows"), [("sasrec", 31), ("mfbpr", 31 + 9), ("bsarec", 31)])
def test_tables_are_those_of_items_and_users(architecture, rows):
    assert cost.table_parameters(make_model(architecture)) == rows * 16


def test_operations_of_a_block_by_hand():
    """One layer: query, output and network of the last row, keys and values of all, and what attention multiplies."""
    model = make_model("sasrec", layers=1, heads=2, length=12).eval()

    products = 12 * 2 * 16 * 16 + 4 * 16 * 16 + 2 * 12 * 16

    assert cost.query_flops(model) == 2 * products


def test_operations_of_the_experts_by_hand():
    """Two matrices for every event of the first layer, and for one of the last, in the one expert it is sent to."""
    models = [make_model("flash4rec", layers=2, length=12, d_expert=width).eval() for width in (32, 16)]

    wide, narrow = map(cost.query_flops, models)

    assert wide - narrow == (12 + 1) * 2 * 2 * 16 * 16


def test_every_model_has_a_cost(architecture):
    name = architecture[0]

    flops = cost.query_flops(make_model(name).eval())

    assert (flops == 0) == (name in ("fpmc", "mfbpr"))  # a sum of table rows
