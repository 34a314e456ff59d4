"""The loop of a cluster on KFP's local runner: a champion, then events of users, which a retraining reads once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from support import YEAR_2001, write_settings

from seqrec.__main__ import main as seqrec
from seqrec.artifacts import INTERACTIONS, read_json
from seqrec.components.other_steps import collect
from seqrec.config import load
from seqrec.evaluation.leaderboard import LEADERBOARD
from seqrec.pipelines.__main__ import main
from seqrec.serving.events import VARIABLE, Event, Store
from seqrec.tracking.registry import reference_statistics

pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping:RuntimeWarning", "ignore:Task:UserWarning")
LATER = YEAR_2001 + 1_030_000  # after the last event of the log
SENT = [
    Event(event_id=f"{user}-{n}", user=f"u{user}", item=f"i{(user + n) % 40}", kind="view", at=LATER + 100 * n + user)
    for user in range(40)
    for n in range(5)
]


def figures(task: Path) -> dict[str, float]:
    (made,) = read_json(task / "executor_output.json")["artifacts"]["metrics"]["artifacts"]
    return made["metadata"]


@pytest.fixture(scope="module")
def loop(tmp_path_factory, forked_steps):
    """The settings, the folders of the tasks of a training and of a retraining after events, and one more `collect`."""
    folder = tmp_path_factory.mktemp("loop")
    settings, out = write_settings(folder, start=YEAR_2001), folder / "out"
    content = yaml.safe_load(settings.read_text())
    content["ingest"]["events"] = True
    content["prepare"] = {"protocol": "temporal", "min_item_events": 1}
    content["register"]["tracking_uri"] = f"sqlite:///{out}/mlflow.db"
    settings.write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"sqlite:///{folder}/events.db")
        for pipeline in ("training", "retraining"):
            flags = ["--pipeline", pipeline, "--models", "sasrec", "--params", str(settings), "--out", str(out)]
            assert main(["run-local", *flags]) == 0, (out / "log.txt").read_text()[-3000:]
            tasks = [next(out.glob(f"seqrec-{kind}-*"), None) for kind in ("training", "retraining")]
            Store(f"sqlite:///{folder}/events.db").add(SENT)
            seqrec(
                ["events", "import", "--interactions", str(tasks[0] / "ingest/data" / INTERACTIONS)]
            )  # as a user may
        again = SimpleNamespace(metadata={})
        collect.python_func("own", str(out / "state"), SimpleNamespace(path=folder / "events"), again)
        yield settings, *tasks, again


def test_a_retraining_reads_each_event_once(loop):
    _, first, second, again = loop
    made = [figures(one / "collect")["new_events"] for one in (first, second)]
    assert [*made, again.metadata["new_events"]] == [0, len(SENT), 0]

    before, after = (pq.read_table(one / "ingest/data" / INTERACTIONS) for one in (first, second))
    assert after.slice(0, len(before)) == before
    added = after.slice(len(before)).to_pydict()
    rows = zip(added["user_id"], added["item_id"], added["timestamp"], strict=True)
    assert list(rows) == sorted(((one.user, one.item, int(one.at)) for one in SENT), key=lambda row: row[2])
    assert len(set(after["row"].to_pylist())) == len(after)


def test_a_retraining_starts_from_the_champion_and_the_gate_compares_on_the_new_cases(loop):
    _, first, second, _ = loop
    decisions = [read_json(one / "register/reports" / LEADERBOARD)["registry"] for one in (first, second)]

    assert decisions[0]["reason"] == "there was no champion before"
    assert "version 1 (measured with another split), measured again on these cases" in decisions[1]["reason"]
    assert "warm start: the champion knows 40 of 40 items" in (second.parent / "log.txt").read_text()
    cuts = [read_json(one / "prepare/sequences/split.json")["valid_cut"] for one in (first, second)]
    assert cuts[0] < cuts[1]


def test_drift_is_measured_against_the_data_of_the_champion_or_of_an_accepted_version(loop):
    settings, first, second, _ = loop
    histograms = [read_json(one / "validate/validation/validation.json")["histograms"] for one in (first, second)]
    assert histograms[0] != histograms[1]
    assert "item_drift" not in figures(first / "validate")
    assert figures(second / "validate")["item_drift"] > 0

    for version, expected in enumerate(histograms, 1):
        assert seqrec(["accept-reference", "--version", str(version), "--params", str(settings)]) == 0
        config = load(settings).section("register")
        assert reference_statistics(dataset="own", config=config) == expected
    assert seqrec(["accept-reference", "--version", "9", "--params", str(settings)]) == 1
