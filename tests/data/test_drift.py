import numpy as np

from seqrec.data import drift


def test_more_of_the_same_is_no_drift():
    before = np.arange(1, 201)

    assert drift.report(before, before * 2) == {
        "known": 200,
        "new": 0,
        "gone": 0,
        "events_added": int(before.sum()),
        "events_removed": 0,
        "share_of_new": 0.0,
        "drift": 0.0,
    }


def test_new_and_vanished_items_are_counted():
    report = drift.report(np.array([4, 3, 0, 2]), np.array([5, 0, 0, 1, 2, 1]))

    assert (report["known"], report["new"], report["gone"]) == (4, 2, 1)
    assert (report["events_added"], report["events_removed"]) == (4, 4)
    assert report["share_of_new"] == 0.75


def test_drift_grows_with_what_changes():
    before = np.full(100, 10)
    mild, strong = before.copy(), before.copy()
    mild[:50] += 12
    mild[50:] += 8
    strong[:10] += 100

    drifts = [drift.report(before, now)["drift"] for now in (mild, strong, np.append(before, [1000] * 5))]

    assert 0 < drifts[0] < 0.1 < drifts[1] < drifts[2]
