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

CONTRAST = """
import sys
from pathlib import Path
from seqrec.config import ModelConfig, PretrainConfig
from seqrec.stages.pretrain import pretrain
import json
options, prepared, out, config = sys.argv[1:]
prepared, out = Path(prepared), Path(out)
pretrain(model="recformer", sequences=prepared, initial=out / "finetuned", state=out / "state", filter_seen=True,
         architecture=ModelConfig(architecture="recformer", options=json.loads(options)),
         config=PretrainConfig(**json.loads(config)), data=prepared.parent)
"""


def run_in_two(script, *arguments):
    """Run `script` in two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launch, str(script), *arguments],
        check=True,
        capture_output=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
    )


def test_two_processes_contrast_with_the_whole_batch(prepared, tmp_path):
    options = {"length": 4, "d_model": 16, "d_inner": 32, "max_tokens": 64, "dropout": 0.0, "mlm_weight": 0.0}
    config = {"epochs": 2, "batch_size": 32, "warmup_steps": 2, "learning_rate": 1e-2, "seed": 1}
    one, two, script = tmp_path / "one", tmp_path / "two", tmp_path / "script.py"
    script.write_text(CONTRAST)
    architecture = ModelConfig(architecture="recformer", options=options)
    paths = {"sequences": prepared, "initial": one / "finetuned", "state": one / "state", "data": prepared.parent}
    pretrain(model="recformer", **paths, filter_seen=True, architecture=architecture, config=PretrainConfig(**config))
    run_in_two(script, json.dumps(options), str(prepared), str(two), json.dumps(config))

    for got, expected in zip(losses_of(two), losses_of(one), strict=True):
        assert got.pop("phase") == expected.pop("phase") == "contrastive"
        assert got == pytest.approx(expected, rel=1e-4)


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
    run_in_two(script, model, str(prepared), str(two), json.dumps(CONFIG))

    for got, expected in zip(losses_of(two), losses_of(one), strict=True):
        assert got.pop("phase") == expected.pop("phase")
        exact = [name for name in expected if not name.startswith("figure/")]  # means of each process's own tokens
        assert {name: got[name] for name in exact} == pytest.approx({name: expected[name] for name in exact}, rel=1e-5)
        assert got.keys() == expected.keys()
