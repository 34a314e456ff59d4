"""A refactoring gives the losses that are checked in; a change that moves them says so in the changelog.

Written by `PYTHONPATH=. python tests/test_golden.py [MODEL...]`.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from support import OPTIONS, losses_of, prepare_rows, run, synthetic_rows

FOLDER = Path(__file__).parent / "golden"
SMALL = {"d_model": 16, "length": 12}
MODELS = OPTIONS | {
    "bert4rec": SMALL,
    "bsarec": SMALL,
    "caser": SMALL,
    "esasrec": SMALL | {"dropout": 0.2},
    "fpmc": SMALL,
    "gru4rec": SMALL | {"d_state": 24, "layers": 2, "item_bias": True},
    "hstu": SMALL | {"dropout": 0.2, "relative_time": True},
    "lrurec": SMALL,
    "mfbpr": SMALL,
}
LOSSES = {"fpmc": {"loss": "bpr", "negatives": 4}, "mfbpr": {"loss": "bpr", "negatives": 4}}  # others: full softmax


def curve(model: str, prepared: Path, folder: Path) -> list[dict[str, float]]:
    run(prepared, folder, model, options=MODELS[model], epochs=3, **LOSSES.get(model, {}))
    return [{key: record[key] for key in ("loss", "valid/ndcg@10")} for record in losses_of(folder)]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_losses_are_the_ones_checked_in(model, prepared, tmp_path):
    expected = json.loads((FOLDER / f"{model}.json").read_text())

    for got, known in zip(curve(model, prepared, tmp_path), expected, strict=True):
        assert got == pytest.approx(known, rel=1e-4)  # kernels differ in the last bits between processors


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(MODELS):
        with tempfile.TemporaryDirectory() as folder:
            found = curve(name, prepare_rows(Path(folder), synthetic_rows()), Path(folder))
            (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
