"""The loop of a cluster: a champion, then events of users, which a retraining on KFP's local runner reads once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from support import YEAR_2001, write_settings

from seqrec.__main__ import main as seqrec
from seqrec.artifacts import INTERACTIONS, SPLIT_CARD, read_json
from seqrec.commands.run import run
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
    """The settings, the folder of a run, that of the tasks of a retraining after events, and one more `collect`."""
    folder = tmp_path_factory.mktemp("loop")
    settings, out = write_settings(folder, start=YEAR_2001), folder / "the out"  # with a blank
    content = yaml.safe_load(settings.read_text())
    content["leaderboard"] = ["sasrec"]
    content["ingest"]["events"] = True
    content["prepare"] = {"protocol": "temporal", "min_item_events": 1}
    settings.write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"sqlite:///{folder}/events.db")
        run(config_file=settings, out=folder / "first", register=True)
        Store(f"sqlite:///{folder}/events.db").add(SENT)
        log = folder / "first/data" / INTERACTIONS
        seqrec(["events", "import", "--interactions", str(log)])  # as a user may
        flags = ["--pipeline", "retraining", "--params", str(settings), "--out", str(out)]
        assert main(["run-local", *flags]) == 0, (out / "log.txt").read_text()[-3000:]
        again = SimpleNamespace(metadata={})
        collect.python_func("own", str(out / "state"), SimpleNamespace(path=folder / "events"), again)
    return settings, folder / "first", next(out.glob("seqrec-retraining-*")), again


def test_a_retraining_reads_each_event_once(loop):
    _, first, second, again = loop
    made = figures(second / "collect")["new_events"]
    assert (made, again.metadata["new_events"]) == (len(SENT), 0)

    before, after = (pq.read_table(data / INTERACTIONS) for data in (first / "data", second / "ingest/data"))
    assert after.slice(0, len(before)) == before
    added = after.slice(len(before)).to_pydict()
    rows = zip(added["user_id"], added["item_id"], added["timestamp"], strict=True)
    assert list(rows) == sorted(((one.user, one.item, int(one.at)) for one in SENT), key=lambda row: row[2])
    assert len(set(after["row"].to_pylist())) == len(after)


def test_a_retraining_starts_from_the_champion_and_the_gate_compares_on_the_new_cases(loop):
    _, first, second, _ = loop

    decision = read_json(second / "register/reports" / LEADERBOARD)["registry"]
    assert "version 1 (measured with another split), measured again on these cases" in decision["reason"]
    assert "warm start: the champion knows 40 of 40 items" in (second.parent / "log.txt").read_text()
    folders = (first / "data/sequences", second / "prepare/sequences")
    cuts = [read_json(folder / SPLIT_CARD)["valid_cut"] for folder in folders]
    assert cuts[0] < cuts[1]


def test_drift_is_measured_against_the_data_of_the_champion_or_of_an_accepted_version(loop):
    settings, first, second, _ = loop
    files = (first / "reports/validation.json", second / "validate/validation/validation.json")
    histograms = [read_json(file)["histograms"] for file in files]
    assert histograms[0] != histograms[1]
    assert figures(second / "validate")["item_drift"] > 0

    for version, expected in enumerate(histograms, 1):
        assert seqrec(["accept-reference", "--version", str(version), "--params", str(settings)]) == 0
        config = load(settings).section("register")
        assert reference_statistics(dataset="own", config=config) == expected
    assert seqrec(["accept-reference", "--version", "9", "--params", str(settings)]) == 1
