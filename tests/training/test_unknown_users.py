"""A user without training events is the unknown user, in training, evaluation and service alike."""

import pytest
import torch
from support import make_model, prepare_rows, run, synthetic_rows

from seqrec.data import sequences
from seqrec.evaluation import ranking
from seqrec.models import REGISTRY
from seqrec.serving.recommender import Recommender
from seqrec.training.checkpoint import load_model

EARLY, LATE = "u0", "late"
USER_MODELS = [name for name in sorted(REGISTRY) if make_model(name).user_tables()]
OPTIONS = {"d_model": 16, "length": 12}
SPECIAL = {"rec_denoiser": {"backbone": "ssept", "backbone_options": {"d_user": 8}, "jacobian": 0.0}}


@pytest.fixture(scope="module")
def temporal(tmp_path_factory):
    """A split by time: one user begins after the training part, and one has a single event in it."""
    rows = synthetic_rows()
    last = max(time for _, _, time in rows)
    rows += [(LATE, f"i{n}", last - 5 + n) for n in range(5)]
    rows += [("once", "i3", rows[0][2])] + [("once", f"i{n}", last - 5 + n) for n in range(4, 9)]
    settings = {"protocol": "temporal", "valid_share": 0.1, "test_share": 0.1}
    return prepare_rows(tmp_path_factory.mktemp("temporal"), rows, **settings)


@pytest.mark.parametrize("model", [*USER_MODELS, "rec_denoiser"])
def test_who_training_did_not_know_is_user_zero(temporal, tmp_path, model):
    data, user_ids = sequences.load(temporal), sequences.read_users(temporal)
    unknown = {user_ids.index(user_id) for user_id in (LATE, "once")}
    assert unknown <= set((~data.trained()).nonzero().flatten().tolist())
    run(temporal, tmp_path, model, epochs=1, options=OPTIONS | SPECIAL.get(model, {}))

    net = load_model(tmp_path / "finetuned")[0]
    for table in net.user_tables():
        rows = table.weight.detach()
        assert len(rows) == data.num_users + 1
        assert torch.equal(rows[1:][~data.trained()], rows[0].expand(int((~data.trained()).sum()), -1))
        assert not (rows[1:][data.trained()] == rows[0]).all(1).any()
    user = torch.tensor(sorted(unknown))
    batch = sequences.window(data, user, data.stop[user], 12)
    assert batch.user.tolist() == [0, 0]

    recommender = Recommender.load(tmp_path / "finetuned")
    answers = {user: recommender.recommend(["i1", "i2"], 5, user=user) for user in (LATE, "once", "nobody", EARLY)}
    assert answers[LATE].scores == answers["once"].scores == answers["nobody"].scores
    assert answers[EARLY].scores != answers["nobody"].scores


def test_an_evaluated_score_is_the_served_one(temporal, tmp_path):
    data, user_ids = sequences.load(temporal), sequences.read_users(temporal)
    run(temporal, tmp_path, "fpmc", epochs=1, options=OPTIONS)
    recommender = Recommender.load(tmp_path / "finetuned")
    user = torch.tensor([user_ids.index(LATE), user_ids.index(EARLY)])

    scorer = ranking.model_scorer(load_model(tmp_path / "finetuned")[0])
    best, score = ranking.best(scorer, data, user, data.stop[user], filter_seen=True, top_k=5)

    for row, place in enumerate(user.tolist()):
        items = data.items[int(data.start[place]) : int(data.stop[place])].tolist()
        history = [recommender.item_ids[item - 1] for item in items]
        answer = recommender.recommend(history, 5, user=user_ids[place])
        assert answer.scores == pytest.approx(score[row].tolist(), abs=1e-6)
        assert [recommender.items[item_id] for item_id in answer.items] == best[row].tolist()
