"""Two processes (gloo) give the losses and metrics of one with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import CONFIG, OPTIONS, losses_of

from seqrec.config import FinetuneConfig, ModelConfig, PretrainConfig
from seqrec.stages.finetune import finetune
from seqrec.stages.pretrain import pretrain

PLAIN = {"dropout": 0.0, "topk_dropout": 0.0, "jitter": 0.0, "balance": 0.0}  # processes draw different numbers
SCRIPT = """
import sys
from pathlib import Path
from seqrec.config import FinetuneConfig, parse
from seqrec.stages.finetune import finetune
import json
model, prepared, out, config = sys.argv[1:]
out = Path(out)
finetune(model=model, sequences=Path(prepared), initial=out / "initial", checkpoint=out / "finetuned",
         state=out / "state", filter_seen=True, config=parse(FinetuneConfig, json.loads(config), "finetune"))
"""


@pytest.mark.parametrize("model", sorted(OPTIONS))
def test_two_processes_equal_one(prepared, tmp_path, model):
    known = OPTIONS[model] | {key: value for key, value in PLAIN.items() if key in ("dropout",) or model == "flash4rec"}
    shared = {"model": model, "sequences": prepared, "filter_seen": True}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        architecture = ModelConfig(architecture=model, options=known)
        config = PretrainConfig(seed=1)
        pretrain(**shared, initial=folder / "initial", state=folder / "state", architecture=architecture, config=config)

    paths = {"initial": one / "initial", "checkpoint": one / "finetuned", "state": one / "state"}
    finetune(**shared, **paths, config=FinetuneConfig(**CONFIG))
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent.parent)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launch, str(script), model, str(prepared), str(two), json.dumps(CONFIG)],
        check=True,
        capture_output=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )

    for got, expected in zip(losses_of(two), losses_of(one), strict=True):
        assert got.pop("phase") == expected.pop("phase")
        exact = [name for name in expected if not name.startswith("figure/")]  # means of each process's own tokens
        assert {name: got[name] for name in exact} == pytest.approx({name: expected[name] for name in exact}, rel=1e-5)
        assert got.keys() == expected.keys()
