"""A model that starts from the champion keeps what that learnt of the items and users that are still there."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from support import FACTS, make_batch, make_model, prepare_rows, run_pretrain, synthetic_rows

from seqrec.artifacts import SPLIT_CARD, USERS, VOCABULARY, WEIGHTS, read_json
from seqrec.data import sequences as prepared_data
from seqrec.training.checkpoint import catalogue_files, load_checkpoint, save_model
from seqrec.training.held_out import split_of
from seqrec.training.warm_start import warm_start

OLD = [*synthetic_rows(users=30, items=20), ("short", "i1", 7), ("short", "i2", 8)]
# A user and an item come before all others, so that every number is another one.
NEW = [
    *(("a-new-user", "a-new-item", moment) for moment in range(9)),
    *(("a-new-user", item, moment) for _, item, moment in OLD[:15]),
    *OLD,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The prepared dataset of the champion, and that of today."""
    folder = tmp_path_factory.mktemp("grown")
    return [prepare_rows(folder / name, rows, min_item_events=1) for name, rows in (("old", OLD), ("new", NEW))]


def new_model(sequences, architecture="flash4rec", **options):
    """Return a model with random weights for a prepared dataset."""
    data = prepared_data.load(sequences)
    return make_model(architecture, num_items=data.num_items, num_users=data.num_users, **options).eval()


def write_champion(folder, sequences, architecture="flash4rec", **options):
    """Write a champion with random weights, as the registry gives it; return the model."""
    model = new_model(sequences, architecture, **options)
    facts = {**FACTS, "model": architecture, "split": split_of(read_json(sequences / SPLIT_CARD))}
    save_model(folder, model, facts, catalogue_files(sequences))
    return model


def numbers(sequences, name, number, key):
    table = pq.read_table(sequences / name).to_pydict()
    return dict(zip(table[key], table[number], strict=True))


@pytest.mark.parametrize(
    ("architecture", "members"), [("flash4rec", 1), ("flash4rec", 2), ("bert4rec", 1), ("ssept", 1), ("caser", 1)]
)
def test_old_items_and_users_score_as_before_and_a_new_item_stays_fresh(folders, tmp_path, architecture, members):
    old, new = folders
    objective = {"objective": "cloze"} if architecture == "bert4rec" else {}
    options = objective | {"members": members}
    champion = write_champion(tmp_path, old, architecture, **options)
    net = new_model(new, architecture, **options)
    fresh = net.item_vectors().detach().clone()

    assert warm_start(net, new, tmp_path)

    items = [numbers(folder, VOCABULARY, "item", "item_id") for folder in folders]
    users = [numbers(folder, USERS, "user", "user_id") for folder in folders]
    assert items[0]["i3"] != items[1]["i3"]
    rows = [[item[name] for name in ("i3", "i7", "i11")] for item in items]
    if objective:  # what is asked for is masked
        rows = [[*row, model.catalogue.num_items + 1] for row, model in zip(rows, (champion, net), strict=True)]
    batches = [make_batch([row], user=user["u5"]) for row, user in zip(rows, users, strict=True)]
    with torch.no_grad():
        scores = [
            model(batch, last=True)[0, 0] @ model.item_vectors()[: model.catalogue.num_items + 1].T
            for model, batch in zip((champion, net), batches, strict=True)
        ]
    shared = sorted(items[0].keys() & items[1].keys())
    assert len(shared) == 20
    first, second = (score[[item[name] for name in shared]] for score, item in zip(scores, items, strict=True))
    torch.testing.assert_close(first, second)
    changed = (net.item_vectors() != fresh).any(1)
    assert changed[items[1]["i3"]]
    assert not changed[items[1]["a-new-item"]]


def test_another_champion_or_none_changes_nothing(folders, tmp_path):
    old, new = folders
    write_champion(tmp_path / "wider", old, "mfbpr", d_model=32)
    write_champion(tmp_path / "of the same options", old, "fpmc")
    (tmp_path / "none").mkdir()
    net = new_model(new, "mfbpr")
    before = {name: value.clone() for name, value in net.state_dict().items()}

    for name in ("wider", "of the same options", "none"):
        assert not warm_start(net, new, tmp_path / name)

    torch.testing.assert_close(net.state_dict(), before)


LATER = [*OLD, *((f"u{user}", f"i{user % 20}", 3_000_000 + user) for user in range(30))]  # an event more for each user
NEWCOMERS = [*OLD, *((f"new{user}", f"i{(user + n) % 20}", 2_000_000 + n) for user in range(6) for n in range(8))]
TIED = [(user, item, moment // 2000) for user, item, moment in OLD]
RATIO = {"protocol": "RATIO-full", "test_share": 0.2, "valid_share": 0.1}


def events(folder, first, stop):
    """The events of the users from their `first` to before their `stop`."""
    data = prepared_data.load(folder)
    users, items = (numbers(folder, *names) for names in ((USERS, "user", "user_id"), (VOCABULARY, "item", "item_id")))
    names = [dict(map(reversed, table.items())) for table in (users, items)]
    return {
        (names[0][user + 1], names[1][int(data.items[event])], int(data.times[event]))
        for user in range(data.num_users)
        for event in range(int(getattr(data, first)[user]), int(getattr(data, stop)[user]))
    }


@pytest.mark.parametrize(
    ("rows", "before", "now", "used"),
    [
        (LATER, {}, {}, True),
        (NEWCOMERS, {}, {"protocol": "LOO-101"}, True),
        (NEWCOMERS, {"protocol": "temporal"}, {"protocol": "temporal"}, True),
        (OLD, {"val_users": 8}, {"val_users": 8}, True),
        (NEWCOMERS, {}, {"val_users": 8}, True),
        (NEWCOMERS, {"val_users": 8}, {"val_users": 8}, False),
        (LATER, RATIO, RATIO, False),
        (OLD, {}, {"protocol": "temporal"}, False),
        (OLD, {"protocol": "temporal"}, {"protocol": "temporal", "valid_share": 0.3}, False),
        (OLD, {}, {"min_item_events": 25}, False),
        (TIED, {}, {"newest_first": True}, False),
        ([row for row in OLD if row[1] != "i3"], {}, {}, False),
        ([row for row in OLD if row[1] != "i3"], {}, {"extend": "old"}, False),
        (LATER, {"extend": "older"}, {"extend": "old"}, True),  # whose item is gone since before the training
        ([*OLD, ("short", "i3", 9)], {"min_user_events": 2}, {"min_user_events": 2}, False),
    ],
)
def test_a_champion_that_was_trained_on_what_is_held_out_now_is_not_used(tmp_path, caplog, rows, before, now, used):
    if now.get("protocol") == "LOO-101":
        rows = [*rows, *((f"c{n % 20}", f"j{n}", n) for n in range(200))]
    folders = []
    if "extend" in before:
        older = [*OLD, *((f"c{n}", "bygone", n) for n in range(9))]
        prepare_rows(tmp_path / "older", older, min_item_events=1)
    for name, log, config in (("old", TIED if rows is TIED else OLD, before), ("new", rows, now)):
        extend = {"extend": str(tmp_path / config["extend"] / "sequences")} if "extend" in config else {}
        folders.append(prepare_rows(tmp_path / name, log, **{"min_item_events": 1, **config, **extend}))
    write_champion(tmp_path / "champion", folders[0], "sasrec")
    net = new_model(folders[1], "sasrec")

    assert warm_start(net, folders[1], tmp_path / "champion") == used

    leaked = events(folders[0], "start", "train_stop") & events(folders[1], "train_stop", "stop")
    assert bool(leaked) != used
    assert ("the champion is not used" in caplog.text) != used


def test_damaged_weights_are_refused(folders, tmp_path):
    old, new = folders
    write_champion(tmp_path, old)
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)

    with pytest.raises(ValueError, match="refusing to load"):
        warm_start(new_model(new), new, tmp_path)


def test_the_stage_takes_the_champion_in_place_of_pre_training(folders, tmp_path):
    old, new = folders
    champion = write_champion(tmp_path / "champion", old, "strec", length=12)
    options, settings = {"d_model": champion.options.d_model, "length": 12}, {"epochs": 1, "batch_size": 16}

    values = run_pretrain("strec", new.parent, tmp_path, options, champion=tmp_path / "champion", **settings)

    assert values["epochs"] == 0
    warm = load_checkpoint(tmp_path / "initial").model
    items = [numbers(folder, VOCABULARY, "item", "item_id")["i3"] for folder in folders]
    torch.testing.assert_close(warm.items.weight[items[1]], champion.items.weight[items[0]])


def test_a_model_that_reads_text_says_that_it_starts_anew(folders, tmp_path, caplog):
    old, new = folders
    write_champion(tmp_path / "champion", old)
    settings = {"architecture": "fdsa", "options": {"d_model": 8, "layers": 1, "heads": 1, "length": 4}, "epochs": 0}

    run_pretrain("mine", new.parent, tmp_path, champion=tmp_path / "champion", **settings)

    assert "the champion is not used: mine reads the text of items, and starts anew" in caplog.text
