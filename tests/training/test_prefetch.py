import threading
import time

import pytest
import torch

from seqrec.training.examples import ahead

CPU = torch.device("cpu")


def test_batches_come_in_order():
    assert list(ahead(lambda place: place * place, 5, CPU)) == [0, 1, 4, 9, 16]
    assert list(ahead(lambda place: place, 0, CPU)) == []


def test_one_batch_is_made_while_the_caller_works_on_another():
    made = []

    def make(place):
        made.append((place, threading.current_thread() is threading.main_thread()))
        return place

    for place in ahead(make, 4, CPU):
        deadline = time.monotonic() + 5
        while len(made) < min(place + 2, 4):
            assert time.monotonic() < deadline
        time.sleep(0.01)
        assert len(made) == min(place + 2, 4)  # the next, and no more
    assert made == [(0, False), (1, False), (2, False), (3, False)]


def test_what_fails_in_the_second_thread_is_raised_here():
    def make(place):
        if place == 1:
            raise OSError("gone")
        return place

    batches = ahead(make, 3, CPU)
    assert next(batches) == 0
    with pytest.raises(OSError, match="gone"):
        next(batches)
