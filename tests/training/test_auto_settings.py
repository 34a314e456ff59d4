"""Rules from the shape of the data: in their ranges, monotone, and as docs/auto.md has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import run

from seqrec.artifacts import MODEL_CARD, read_json
from seqrec.commands.auto_training import model_settings
from seqrec.commands.settings import check
from seqrec.config import ConfigError, FinetuneConfig, PretrainConfig, from_dict, parse
from seqrec.models import REGISTRY
from seqrec.training import auto_settings as auto
from seqrec.training.auto_settings import Shape


def shape(users=1_000, median=20.0, items=500, ninth=None):
    ninth = 4 * median if ninth is None else ninth
    events = int(users * median * 1.5)
    return Shape(users=users, items=items, events=events, median=median, ninth=ninth, longest=int(8 * median))


SHAPES = [shape(users, median) for users in (2, 610, 50_000, 10**7) for median in (2, 20, 3_000)]


@pytest.mark.parametrize("given", SHAPES, ids=lambda one: f"{one.users}x{one.median:g}")
def test_every_shape_gives_settings_in_their_ranges(given):
    for own in ({}, {"epochs": 1}, {"batch_size": 8, "windows": "last"}):
        config = FinetuneConfig(**auto.finetune(given, own))
        assert {name: getattr(config, name) for name in own} == own
        total = config.epochs * auto.steps_an_epoch(given, config.windows, config.batch_size)
        assert config.warmup_steps <= total / 10
    ruled = auto.finetune(given, {})
    assert 16 <= ruled["batch_size"] <= 256
    assert 5 <= ruled["epochs"] <= 100
    encoders = [("recformer", {"encoder": encoder}) for encoder in ("text", "auto")]
    for name, own in (*((name, {}) for name in REGISTRY), *encoders):
        entry = {"architecture": name} | model_settings(name, given, {}, options=own)
        check(from_dict({"dataset": "any", "models": {name: entry}, "leaderboard": [name]}), ingests=False)
        options = parse(REGISTRY[name].Options, entry["options"], "options")
        assert 8 <= options.length <= 200
    for name in ("flash4rec", "sasrec", "gru4rec"):
        options = parse(REGISTRY[name].Options, auto.options(name, given), "options")
        assert 0.2 <= options.dropout <= 0.5


def test_more_users_never_mean_smaller_batches_or_models_nor_more_epochs_or_dropout():
    grown = [shape(users) for users in (10, 100, 1_000, 10_000, 100_000, 10**6)]

    settings = [auto.finetune(one, {}) | auto.options("sasrec", one) for one in grown]
    for name in ("batch_size", "d_model", "layers"):
        assert [one[name] for one in settings] == sorted(one[name] for one in settings), name
    for name in ("epochs", "dropout"):
        assert [one[name] for one in settings] == sorted((one[name] for one in settings), reverse=True), name


def test_longer_histories_never_mean_shorter_windows():
    lengths = [auto.length(shape(median=median)) for median in (1, 5, 20, 50, 500)]

    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (8, 200)


def test_a_small_log_trains_on_all_of_it_and_a_large_one_on_the_last_windows():
    assert auto.windows(shape(users=900, median=100)) == "all"
    assert auto.windows(shape(users=10**6, median=100)) == "last"
    assert auto.windows(shape(users=900, median=10, ninth=100)) == "last"  # nothing lies before the last window
    assert auto.windows(shape(users=900, median=10, ninth=100), 8) == "all"


def test_a_large_catalogue_is_sampled_and_then_affords_more_epochs():
    small, large = shape(users=50_000, median=8, items=5_000), shape(users=50_000, median=8, items=50_000)

    assert auto.finetune(small, {})["loss"] == "ce"
    sampled, full = auto.finetune(large, {}), auto.finetune(large, {"loss": "ce"})
    assert (sampled["loss"], full["loss"]) == ("sampled_ce", "ce")
    assert sampled["epochs"] > full["epochs"]


def test_shorter_epochs_are_more_and_have_as_short_a_warm_up():
    large = shape(users=200_000, median=100)
    whole, short, longer = (auto.finetune(large, {"epoch_steps": steps}) for steps in (0, 30, 10**6))

    assert (whole["epochs"], short["epochs"]) == (5, 67)
    assert (whole["warmup_steps"], short["warmup_steps"]) == (100, 100)
    assert auto.finetune(large, {"epochs": 5, "epoch_steps": 30})["warmup_steps"] == 7
    assert longer == whole | {"epoch_steps": 10**6}
    ruled = dict.fromkeys(("epochs", "batch_size", "loss", "negatives", "windows"), "auto")
    config = parse(FinetuneConfig, ruled | {"epoch_steps": 30}, "finetune")
    assert auto.resolved(config, large, "sasrec", {}).epochs == short["epochs"]


@pytest.mark.parametrize(
    ("architecture", "settings", "sparse"),
    [
        *((one, {}, True) for one in ("flash4rec", "sasrec", "gru4rec", "hstu")),
        ("recformer", {}, False),  # its vectors are no rows of a table
        ("sasrec", {"loss": "ce"}, False),
        ("sasrec", {"weight_decay": 0.1}, False),
    ],
)
def test_a_step_updates_only_the_rows_that_it_reads_of_a_large_catalogue(architecture, settings, sparse):
    large = shape(users=500_000, median=8, items=auto.WHOLE_TABLE + 1)

    def found(shape):
        config = parse(FinetuneConfig, {"loss": "auto", "sparse_tables": "auto"} | settings, "finetune")
        return auto.resolved(config, shape, architecture, {}).sparse_tables

    assert found(large) is sparse
    assert found(replace(large, items=auto.WHOLE_TABLE)) is False
    assert model_settings(architecture, large, {}, finetune=settings)["finetune"]["sparse_tables"] is sparse


def test_tied_events_are_shuffled_where_their_order_is_random_and_in_memory():
    def found(*, ordered, **settings):
        config = parse(FinetuneConfig, {"ties": "auto"} | settings, "finetune")
        return auto.resolved(config, replace(shape(), ordered=ordered), "sasrec", {}).ties

    assert (found(ordered=True), found(ordered=False)) == ("keep", "shuffle")
    kept, shuffled = (auto.finetune(replace(shape(20_000), ordered=ordered), {})["epochs"] for ordered in (True, False))
    assert shuffled == 2 * kept
    assert found(ordered=False, resident=False) == found(ordered=False, ties="keep") == "keep"
    with pytest.raises(ConfigError, match="ties: shuffle needs resident: true"):
        parse(FinetuneConfig, {"ties": "shuffle", "resident": False}, "finetune")


def test_sparse_logs_get_one_layer_and_no_vectors_of_users():
    sparse = auto.options("flash4rec", shape(users=50_000, median=6))

    assert (sparse["layers"], sparse["user_gate"], sparse["user_dropout"]) == (1, False, 0.0)
    assert auto.options("flash4rec", shape(users=50_000, median=60))["user_gate"] is True


@pytest.mark.parametrize("name", ["flash4rec", "sasrec", "gru4rec"])
def test_words_are_read_where_items_have_text_and_few_events(name):
    def words(items, described=True):
        found = auto.options(name, replace(shape(items=items), described=described))  # 30,000 events
        return found["attribute_values"]

    assert (words(1_001), words(1_000), words(1_001, described=False)) == (32, 0, 0)


def test_vectors_of_rare_items_without_words_start_with_counts():
    def start(items, described=False, **given):
        of = replace(shape(items=items), described=described)
        return model_settings("sasrec", of, {}, pretrain=given)["pretrain"]["item_vectors"]

    assert (start(1_001), start(1_000), start(1_001, item_vectors="random")) == ("counts", "random", "random")
    assert start(1_001, described=True) == "random"


def test_vectors_of_items_start_with_counts_where_the_training_is_short():
    many = replace(shape(users=10_000, items=1_000), events=1_000_000)  # 1,000 of each item

    def start(**limits):
        entry = model_settings("sasrec", many, limits)
        return entry["pretrain"]["item_vectors"], auto.number_of_targets(many, entry["finetune"])

    whole = auto.steps_an_epoch(many, "all", auto.batch_size(many, "all"))
    assert start() == ("random", 20 * 1_000_000)
    assert start(epochs=5, epoch_steps=whole // 10) == ("counts", pytest.approx(500_000, rel=0.05))
    assert start(epochs=5, epoch_steps=10 * whole) == ("random", 5 * 1_000_000)
    assert (start(epochs=2)[0], start(epochs=1)[0]) == ("random", "counts")


@pytest.mark.parametrize(
    ("name", "given", "rate"),
    [
        ("flash4rec", {}, 2e-3),  # with words
        ("flash4rec", {"attribute_values": 0}, 3e-3),
        ("gru4rec", {}, 2e-3),
        ("recformer", {}, 2e-3),
        ("recformer", {"encoder": "text"}, 1e-3),
        ("sasrec", {}, 2e-3),
        ("caser", {}, 1e-3),
    ],
)
def test_the_learning_rate_depends_on_the_architecture_and_what_it_reads(name, given, rate):
    described = replace(shape(items=1_001), described=True)

    assert model_settings(name, described, {}, options=given)["finetune"]["learning_rate"] == rate


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize(
    ("switch", "switched", "none", "own"),
    [("attribute_values", "attributes", (), ("title",)), ("user_gate", "user_dropout", 0.0, 0.4)],
)
def test_one_of_two_options_that_depend_on_each_other_can_be_set(switch, switched, none, own, described, caplog):
    items, median = (1_001, 20.0) if described else (1_000, 5.0)  # the rules turn both switches on, or off
    given = replace(shape(items=items, median=median), described=described)
    off = {"attribute_values": 0, "user_gate": False}[switch]

    for set_ in ({switch: off}, {switched: own}):
        options = dict.fromkeys(("length", switch, "user_dropout"), "auto") | set_
        entry = {"architecture": "flash4rec", "options": options}
        config = from_dict({"dataset": "any", "models": {"m": entry}, "leaderboard": ["m"]})
        check(config, ingests=False)
        found = auto.resolved_options(config.model("m"), given, "models.m.options").options
        options = parse(REGISTRY["flash4rec"].Options, found, "options")
        assert getattr(options, switched) == (set_.get(switched, none) if described else none)
        entry = model_settings("flash4rec", given, {}, options=set_)
        assert parse(REGISTRY["flash4rec"].Options, entry["options"], "here")
    assert (f"{switched}: no effect, as {switch} is off" in caplog.text) is not described
    with pytest.raises(ConfigError, match=switched):
        parse(REGISTRY["flash4rec"].Options, auto.merged({}, {switch: off, switched: own}, "here"), "here")


def test_auto_in_the_library_is_as_in_params():
    options, finetune = {"d_model": "auto", "length": 7}, {"epochs": "auto"}

    found = model_settings("sasrec", shape(), {}, options=options, finetune=finetune)

    assert found == model_settings("sasrec", shape(), {}, options={"length": 7})


def test_an_option_without_a_rule_cannot_be_auto():
    params = from_dict({"dataset": "mine", "models": {"sasrec": {"options": {"length": "auto", "heads": "auto"}}}})

    with pytest.raises(ConfigError, match=r"^models.sasrec.options.heads: "):
        check(params, ingests=False)


@pytest.mark.parametrize(
    ("section", "values", "wrong"),
    [
        (FinetuneConfig, {"epochs": "all"}, "epochs"),
        (FinetuneConfig, {"weight_decay": "auto"}, "weight_decay"),
        (PretrainConfig, {"epochs": "auto"}, "epochs cannot be auto"),
    ],
)
def test_auto_has_its_places(section, values, wrong):
    with pytest.raises(ConfigError, match=wrong):
        parse(section, values, "here")


def test_a_dataset_decides_what_a_model_leaves_to_the_rules():
    content = {
        "dataset": "mine",
        "finetune": {"epochs": "auto", "patience": "auto"},
        "datasets": {"mine": {"finetune": {"epochs": 3}, "options": {"length": 7, "dropout": 0.1}}},
        "models": {"sasrec": {"options": {"length": "auto", "dropout": 0.2, "layers": "auto"}}},
    }

    params = from_dict(content)

    config = params.section("finetune", model="sasrec")
    assert (config.epochs, config.patience) == (3, "auto")
    assert params.model("sasrec").options == {"length": 7, "dropout": 0.2, "layers": "auto"}


def test_a_training_card_holds_the_numbers_that_the_rules_gave(prepared, data, tmp_path):
    options = dict.fromkeys(("length", "d_model", "d_state", "dropout"), "auto")
    ruled = [name for name in auto.RULED if name != "epochs"]
    settings = dict.fromkeys(ruled, "auto")

    run(prepared, tmp_path, model="gru4rec", options=options | {"item_bias": True}, epochs=1, **settings)

    given, card = Shape.of(data), read_json(tmp_path / "finetuned" / MODEL_CARD)
    assert {name: card["options"][name] for name in options} == {n: auto.options("gru4rec", given)[n] for n in options}
    assert card["options"]["item_bias"] is True
    assert card["config"]["learning_rate"] == 2e-3
    expected = auto.finetune(given, {"epochs": 1}, "gru4rec")
    assert {name: card["config"][name] for name in ruled} == {name: expected[name] for name in ruled}


def test_the_shape_is_that_of_the_training_part(data):
    events = (data.train_stop - data.start).double()

    measured = Shape.of(data)

    assert (measured.users, measured.items) == (data.num_users, data.num_items)
    assert measured.events == int(events.sum())
    assert measured.median == float(torch.quantile(events, 0.5))


@pytest.mark.parametrize("gpu", [False, True])
def test_bf16_is_for_cpus_that_have_it(monkeypatch, gpu):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)

    assert auto.finetune(shape(), {})["precision"] == ("fp32" if gpu else "bf16")
