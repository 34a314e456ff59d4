"""Users to show: who is drawn, and that what is shown of them is what the stages before have found."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import save

from seqrec.analysis import attribution, examples
from seqrec.artifacts import CASES_SCHEMA
from seqrec.config import EvaluateConfig
from seqrec.data import sequences
from seqrec.evaluation import results
from seqrec.evaluation.ranking import model_scorer
from seqrec.stages.baselines import baselines
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_model

CONFIG = EvaluateConfig(top_k=10, bootstrap=100)
MODELS = ("sasrec", "rec_denoiser", "gru4rec", "strec", "popularity")


@pytest.fixture(scope="module")
def folders(prepared, tmp_path_factory):
    """Untrained models and the baselines, evaluated on the synthetic log."""
    root = tmp_path_factory.mktemp("evaluated")
    data = sequences.load(prepared)
    baselines(sequences=prepared, data=prepared.parent, artifacts=root / "artifacts", reports=root, config=CONFIG)
    checkpoints = dict.fromkeys(MODELS)
    torch.manual_seed(1)
    for name in MODELS[:-1]:
        checkpoints[name] = load_checkpoint(save(name, prepared, root / name / "saved", options={"length": 8}))
        with torch.no_grad():
            results.report(model_scorer(checkpoints[name].model), data, root / name, CONFIG, {})
    checkpoints["popularity"] = load_checkpoint(root / "artifacts/popularity/finetuned")
    return {"checkpoints": checkpoints, "reports": root, "sequences": prepared}


def choose(given, number=4, seed=3, **changes):
    given = {"leader": "sasrec", "number": number, "seed": seed, **given, **changes}
    folders = {name: saved.folder for name, saved in given.pop("checkpoints").items()}
    return examples.choose(folders=folders, **given)


def test_one_model_is_in_memory_at_a_time(folders, monkeypatch):
    alive, most = weakref.WeakSet(), []

    def counted(folder):
        gc.collect()
        saved = load_checkpoint(folder)
        alive.add(saved.model)
        most.append(len(alive))
        return saved

    monkeypatch.setattr(examples, "load_checkpoint", counted)
    choose(folders)

    assert most == [1] * len(MODELS)


@pytest.fixture(scope="module")
def shown(folders):
    return choose(folders)


def test_an_example_is_what_the_evaluation_found(folders, shown):
    data, user_ids = sequences.load(folders["sequences"]), sequences.read_users(folders["sequences"])
    cases = pq.read_table(folders["reports"] / "sasrec/cases.parquet").to_pylist()
    lists = pq.read_table(folders["reports"] / "sasrec/recommendations.parquet").to_pylist()

    assert len(shown.users) == 4
    for user in shown.users:
        number = user_ids.index(user.user_id) + 1
        events = data.items[data.start[number - 1] : data.stop[number - 1]].tolist()
        assert (user.history, user.target) == (events[:-1], events[-1])
        (case,) = [case for case in cases if (case["split"], case["user"]) == ("test", number)]
        assert user.opinions["sasrec"].rank == case["rank"]
        best = sorted((row["rank"], row["item"]) for row in lists if row["user"] == number)
        assert user.opinions["sasrec"].best == [item for _, item in best]
        assert list(user.opinions) == list(MODELS)


@pytest.mark.parametrize(
    ("ranks", "positions", "number", "found"),
    [
        ([1, 2, 3, 99], [5] * 4, 4, 3),  # too few were missed
        ([1, 99], [5, 5], 4, 1),  # too few users
        ([1, 99, 98], [0, 5, 5], 2, 0),  # nothing to show of who has no history
        ([1, 99], [5, 5], 0, 0),
        ([10] + [11] * 9, [5] * 10, 2, 1),  # found is among the ten best
    ],
)
def test_where_too_few_are_of_one_kind_the_other_fills_up(ranks, positions, number, found):
    chosen = examples._draw(np.array(ranks), np.array(positions), number, seed=0)

    assert len(set(chosen.tolist())) == min(number, sum(position > 0 for position in positions))
    assert sum(ranks[index] <= 10 for index in chosen) == found
    assert all(positions[index] > 0 for index in chosen)


def test_drivers_are_those_of_the_first_item(folders, shown):
    data, user_ids = sequences.load(folders["sequences"]), sequences.read_users(folders["sequences"])
    for name in MODELS[:-1]:
        model = folders["checkpoints"][name].model
        for user in shown.users:
            number = torch.tensor([user_ids.index(user.user_id)])
            batch = sequences.window(data, number, data.stop[number] - 1, len(user.history))
            opinion = user.opinions[name]
            drop = attribution.leave_one_out(model, batch, torch.tensor(opinion.best[:1]))
            assert opinion.drop == pytest.approx(drop[0].tolist(), abs=1e-5)
            assert (opinion.attention is None) == (name in ("gru4rec", "strec"))
            if opinion.attention is not None:
                weight = attribution.attention(model, batch)
                assert opinion.attention == pytest.approx(weight[0].tolist(), abs=1e-6)
    for user in shown.users:
        assert user.opinions["popularity"].drop == [0] * len(user.history)
        assert user.opinions["popularity"].attention is None


def test_only_models_with_masks_or_fewer_rows_have_heat_maps_or_sparsities(folders, shown):
    seen = min(8, len(shown.users[0].history))

    assert (list(shown.masked), list(shown.sparse)) == (["rec_denoiser"], ["strec"])
    before, after = (torch.tensor(weights) for weights in shown.masked["rec_denoiser"])
    assert before.shape == after.shape == (seen, seen)
    assert after.sum() < before.sum() - 0.01
    data, user_ids = sequences.load(folders["sequences"]), sequences.read_users(folders["sequences"])
    first = torch.tensor([user_ids.index(shown.users[0].user_id)])
    batch = sequences.window(data, first, data.stop[first] - 1, seen)
    expected = attribution.masked_attention(folders["checkpoints"]["rec_denoiser"].model, batch)
    torch.testing.assert_close(before, expected[0][0])


def test_items_without_a_title_go_by_their_id(folders, shown, prepared, tmp_path):
    saved = folders["checkpoints"]["sasrec"]
    save_model(tmp_path, saved.model, saved.card, catalogue_files(prepared))
    checkpoints = folders["checkpoints"] | {"sasrec": load_checkpoint(tmp_path)}
    titled, plain = shown.names, choose(folders, checkpoints=checkpoints).names
    item_ids = sequences.read_items(prepared)

    assert titled == {item: f"Title of {item_ids[item - 1]}" for item in titled}
    assert plain == {item: item_ids[item - 1] for item in titled}


def test_nobody_to_show_is_no_error(folders, tmp_path):
    pq.write_table(pa.table([[]] * 6, schema=CASES_SCHEMA), tmp_path / "cases.parquet")
    assert choose(folders, leader=tmp_path).users == []
