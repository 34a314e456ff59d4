"""The weights say who is known: in training, evaluation, batch scoring, explanations and service alike."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from support import make_model, prepare_rows, run, run_finetune, run_pretrain, synthetic_rows, weights

from seqrec.analysis import examples
from seqrec.artifacts import RECOMMENDATIONS, REFITTED
from seqrec.commands.recommend import score
from seqrec.config import ConfigError, EvaluateConfig, FinetuneConfig
from seqrec.data import sequences
from seqrec.evaluation.metrics import SELECTION
from seqrec.models import REGISTRY
from seqrec.models.optional import DescribedItems
from seqrec.serving.recommender import Recommender, Request
from seqrec.stages import finetune
from seqrec.stages.evaluate import evaluate
from seqrec.training import batches
from seqrec.training.checkpoint import load_checkpoint
from seqrec.training.train import user_tables

EARLY, LATE, MIDDLE = "u0", "late", "middle"
OPTIONS = {"d_model": 16, "length": 12}
SPECIAL = {"rec_denoiser": {"backbone": "ssept", "jacobian": 0.0}}
USER_MODELS = [
    name
    for name, cls in sorted(REGISTRY.items())
    if not issubclass(cls, DescribedItems) and "user" in make_model(name, **SPECIAL.get(name, {})).needs
]


@pytest.fixture(scope="module")
def temporal(tmp_path_factory):
    """A split by time: two users begin after the training part, and one has a single event in it."""
    rows = synthetic_rows()
    last = max(time for _, _, time in rows)
    rows += [(LATE, f"i{n}", last - 5 + n) for n in range(5)]
    validated = sorted(time for _, _, time in rows)[int(0.85 * len(rows))]
    rows += [(MIDDLE, f"i{n}", validated + n) for n in range(5)] + [(MIDDLE, "i9", last)]
    rows += [(f"u{n}", "i_valid", validated + n) for n in range(5)]  # items that begin with a part
    rows += [(f"u{n}", item, last + n) for n in range(5) for item in ("i_valid", "i_test")]
    rows += [("once", "i3", rows[0][2])] + [("once", f"i{n}", last - 5 + n) for n in range(4, 9)]
    settings = {"protocol": "temporal", "valid_share": 0.1, "test_share": 0.1, "filter_on": "all"}
    return prepare_rows(tmp_path_factory.mktemp("temporal"), rows, **settings)


@pytest.mark.parametrize("model", USER_MODELS)
def test_who_training_did_not_know_has_the_vector_of_user_zero(temporal, tmp_path, model):
    """With `user_share`, these are also users with training events."""
    data, user_ids = sequences.load(temporal), sequences.read_users(temporal)
    config = {"epochs": 1, "user_share": 0.3}
    known_U = batches.trained_users(data, FinetuneConfig(**config))
    assert 0 < int(known_U.sum()) < int(data.trained().sum()) < data.num_users
    assert not any(known_U[user_ids.index(user_id)] for user_id in (LATE, MIDDLE, "once"))
    figures = run(temporal, tmp_path, model, options=OPTIONS | SPECIAL.get(model, {}), **config)

    for table in user_tables(load_checkpoint(tmp_path / "finetuned").model):
        rows = table.weight.detach()
        assert len(rows) == data.num_users + 1
        assert torch.equal(rows[1:][~known_U], rows[0].expand(int((~known_U).sum()), -1))
        assert not (rows[1:][known_U] == rows[0]).all(1).any()

    shared = {"model": model, "sequences": temporal, "checkpoint": tmp_path / "finetuned", "report": tmp_path}
    assert evaluate(**shared, config=EvaluateConfig())[SELECTION] == pytest.approx(figures[SELECTION])
    recommender = Recommender.load(tmp_path / "finetuned")
    someone = user_ids[int(known_U.nonzero()[0])]
    answers = {user: recommender.recommend(["i1", "i2"], 5, user=user) for user in (LATE, "once", "nobody", someone)}
    assert answers[LATE].scores == answers["once"].scores == answers["nobody"].scores
    assert answers[someone].scores != answers["nobody"].scores


@pytest.mark.parametrize(
    ("options", "config"),
    [({"attribute_values": 4}, {}), ({}, {"loss": "sampled_ce", "negatives": 5, "sampler": "popularity"})],
)
def test_training_on_a_share_of_the_users_does_not_read_the_counts_of_all(
    temporal, tmp_path, monkeypatch, options, config
):
    settings = {"counts": "none", "epochs": 1, "batch_size": 8, "user_share": 0.3, **config}
    load = finetune.load_sequences
    for name in ("as it is", "other counts"):
        run_pretrain("sasrec", temporal.parent, tmp_path / name, OPTIONS | options)
        run_finetune("sasrec", temporal.parent, tmp_path / name, **settings)
        other = replace(load(temporal), count=load(temporal).count.flip(0))
        monkeypatch.setattr(finetune, "load_sequences", lambda _, other=other: other)

    one, two = (weights(tmp_path / name) for name in ("as it is", "other counts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    run_pretrain("sasrec", temporal.parent, tmp_path, OPTIONS, item_vectors="counts")
    with pytest.raises(ConfigError, match="user_share: vectors from counts read every user"):
        run_finetune("sasrec", temporal.parent, tmp_path, **settings)


@pytest.mark.parametrize("model", ["flash4rec", "mfbpr"])  # of a history and its user, and of the user alone
def test_a_refit_knows_the_same_users_wherever_it_ranks(temporal, tmp_path, model):
    """Evaluation, batch scoring and explanations give each user what the service gives; some began after training."""
    run(temporal, tmp_path, model, epochs=2, refit="valid", learning_rate=0.05, options=OPTIONS)
    data, user_ids = sequences.load(temporal), sequences.read_users(temporal)
    checkpoint, reports = tmp_path / "finetuned", tmp_path / "reports"
    served = Recommender.load(checkpoint / REFITTED)
    late, middle = (served.recommend(["i1", "i2"], user=user).scores for user in (LATE, MIDDLE))
    assert late != middle  # the refit knows who began in the validation part

    def answer(user, stop):
        events = slice(int(data.start[user]), int(stop))
        history = [served.item_ids[item - 1] for item in data.items[events].tolist()]
        request = Request(history=history, times=data.times[events].tolist(), user=user_ids[user], k=5)
        return request, served.answer([request])[0]

    config = EvaluateConfig(refit="valid", top_k=10)
    shared = {"model": model, "sequences": temporal, "checkpoint": checkpoint}
    values = evaluate(**shared, report=reports / model, config=config)
    first = evaluate(**shared, report=tmp_path / "first", config=EvaluateConfig())
    assert values["valid/cases/popularity=cold"] == first["valid/cases/popularity=cold"] == 5
    assert (first["test/cases/popularity=cold"], values["test/cases/popularity=cold"]) == (10, 5)  # i_test alone
    lists = pq.read_table(reports / model / RECOMMENDATIONS).to_pylist()
    users = {row["user"] - 1 for row in lists}
    assert {user_ids.index(user_id) for user_id in (EARLY, LATE, MIDDLE)} <= users
    for user in users:
        request, expected = answer(user, data.valid_stop[user])
        best = [(served.item_ids[row["item"] - 1], row["score"]) for row in lists if row["user"] == user + 1]
        found = [score for item_id, score in best if item_id not in request.history]  # a target may be a repetition
        assert found[:5] == pytest.approx(expected.scores, abs=1e-4)

    score(sequences=temporal, saved=checkpoint / REFITTED, output=tmp_path / "best.parquet", k=5)
    for user, row in enumerate(pq.read_table(tmp_path / "best.parquet").to_pylist()):
        assert row["scores"] == pytest.approx(answer(user, data.stop[user])[1].scores, abs=1e-4)

    folders = {"folders": {model: checkpoint}, "reports": reports, "sequences": temporal}
    for shown in examples.choose(leader=model, number=len(users), seed=0, **folders).users:
        user = user_ids.index(shown.user_id)
        request, opinion = answer(user, data.valid_stop[user])[0], shown.opinions[model]
        assert opinion.drop == pytest.approx(served.explain(request, served.item_ids[opinion.best[0] - 1]), abs=1e-4)
