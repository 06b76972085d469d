"""A permutation is a keyed bijection of [0, n) that is computed both ways, for every n, and looks random."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.order.permute import Permutation, Shuffles, permutation

AROUND_POWERS_OF_TWO = sorted({n for k in range(1, 21) for n in (2**k - 1, 2**k, 2**k + 1)})


def assert_bijection(n: int, key: int) -> None:
    shuffled = Permutation(n, key)
    image = shuffled.at(np.arange(n))
    assert image.dtype == np.int64
    seen = np.zeros(n, bool)
    seen[image] = True
    assert seen.all(), f"n={n}, key={key}: some number is never reached"
    assert np.array_equal(shuffled.inverse(image), np.arange(n)), f"n={n}, key={key}: the inverse is wrong"


def test_it_is_a_bijection_with_its_inverse_for_every_n_to_4096():
    for n in range(1, 4097):
        assert_bijection(n, key=n * 7919)


def test_it_is_a_bijection_just_above_the_largest_table():
    for n in [*range(4097, 4200), 65_537]:  # 65,537: where a well-known shuffle is not a bijection
        assert_bijection(n, key=n)


@pytest.mark.parametrize("n", AROUND_POWERS_OF_TWO)
def test_it_is_a_bijection_around_every_power_of_two(n):
    assert_bijection(n, key=2024)


@given(n=st.integers(1, 50_000), key=st.integers(0, 2**64 - 1))
def test_it_is_a_bijection_for_any_length_and_key(n, key):
    assert_bijection(n, key)


@pytest.mark.parametrize("k", range(20, 63))
def test_the_inverse_leads_back_up_to_two_to_the_62(k):
    for n in {2**k - 1, 2**k, min(2**k + 1, 2**62)}:
        shuffled = Permutation(n, key=k)
        some = np.random.default_rng(k).integers(0, n, 2000)
        some[:2] = 0, n - 1
        image = shuffled.at(some)
        assert image.min() >= 0
        assert image.max() < n
        assert len(np.unique(image)) == len(np.unique(some))
        assert np.array_equal(shuffled.inverse(image), some)
        assert np.array_equal(shuffled.at(shuffled.inverse(some)), some)


@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_the_inverse_leads_back_for_any_length_and_key(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    shuffled = Permutation(n, key)
    assert shuffled.inverse(shuffled.at(index)).tolist() == index
    assert shuffled.at(shuffled.inverse(index)).tolist() == index


@pytest.mark.parametrize("n", [1_000_000, 1_000_003, 2**20, 2**20 + 1])
@pytest.mark.parametrize("key", [0, 1, 2**63 + 11])
def test_it_looks_random_at_a_million(n, key):
    image = Permutation(n, key).at(np.arange(n))
    parity = np.corrcoef(np.arange(n) & 1, image & 1)[0, 1]
    lag_one = np.corrcoef(image[:-1], image[1:])[0, 1]
    identity = np.corrcoef(np.arange(n), image)[0, 1]
    adjacent = np.abs(np.diff(image)).mean()
    assert abs(parity) < 0.005
    assert abs(lag_one) < 0.005
    assert abs(identity) < 0.005
    assert adjacent == pytest.approx(n / 3, rel=0.005)  # what a true random permutation has
    # Neighbours that stay neighbours: about 2 are expected, and a structured shuffle has thousands.
    assert (np.abs(np.diff(image)) == 1).sum() < 20


@pytest.mark.parametrize("n", [10, 97, 1000])
def test_small_permutations_depend_on_every_key_bit(n):
    images = {tuple(Permutation(n, 1 << bit).at(np.arange(n)).tolist()) for bit in range(64)}
    assert len(images) == 64


def test_another_name_is_another_order():
    orders = {
        tuple(permutation(100, *names).at(range(100)).tolist())
        for names in [(7, "web", 0), (7, "web", 1), (7, "code", 0), (8, "web", 0)]
    }
    assert len(orders) == 4


def test_an_index_does_not_depend_on_what_is_asked_with_it():
    shuffled = Permutation(10**9, key=5)
    together = shuffled.at([3, 14, 159, 999_999_999])
    alone = [int(shuffled.at([i])[0]) for i in (3, 14, 159, 999_999_999)]
    assert together.tolist() == alone


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_a_length_that_cannot_be_permuted_is_refused(n):
    with pytest.raises(ValueError, match=str(n)):
        Permutation(n, 0)


SIZES = (10, 4096, 4097, 100_003, 5 * 10**9, 1)


def made(source, epoch):
    return permutation(SIZES[source], 7, f"source {source}", epoch)


def some_rows(seed, num_epochs, sources=range(6)):
    random = np.random.default_rng(seed)
    source = random.choice(np.array(sources, np.int32), 400)
    return source, random.integers(0, num_epochs, 400), random.integers(0, np.array(SIZES)[source])


def one_by_one(source, epoch, index):
    return [int(made(s, e).at([i])[0]) for s, e, i in zip(*(a.tolist() for a in (source, epoch, index)), strict=True)]


@pytest.mark.parametrize("num_epochs", [1, 2, 4, 50])
@pytest.mark.parametrize("sources", [range(6), [0, 1, 5], [2, 3, 4], [3]], ids=["all", "tables", "networks", "one"])
def test_rows_of_many_sources_go_where_each_permutation_sends_them(num_epochs, sources):
    shuffles = Shuffles(len(SIZES))
    for seed in range(3):
        rows = some_rows(seed, num_epochs, sources)
        image = shuffles.at(*rows, made)
        assert image.dtype == np.int64
        assert image.tolist() == one_by_one(*rows)


def test_epochs_that_come_back_go_where_they_went():
    shuffles = Shuffles(len(SIZES))
    source, _, index = some_rows(0, 1)
    for epoch in (0, 4, 0, 8, 4, 3, 0, 10**15):
        rows = source, np.full(len(source), epoch), index
        assert shuffles.at(*rows, made).tolist() == one_by_one(*rows)


def test_tables_that_are_begun_anew_hold_what_they_held(monkeypatch):
    monkeypatch.setattr(Shuffles, "TABLE_ITEMS", 5000)
    shuffles = Shuffles(len(SIZES))
    for seed in range(6):
        rows = some_rows(seed, 3)
        assert shuffles.at(*rows, made).tolist() == one_by_one(*rows)


def test_shuffles_go_to_other_processes():
    rows = some_rows(0, 3)
    shuffles = Shuffles(len(SIZES))
    expected = shuffles.at(*rows, made).tolist()
    assert pickle.loads(pickle.dumps(shuffles)).at(*rows, made).tolist() == expected


def test_threads_that_share_shuffles_get_what_one_gets():
    shuffles, found = Shuffles(len(SIZES)), {}
    calls = [some_rows(seed, 6) for seed in range(8)]

    def work(turn):
        for seed in range(8)[:: 1 if turn % 2 else -1]:
            found[turn, seed] = shuffles.at(*calls[seed], made).tolist()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [one_by_one(*rows) for rows in calls]
    assert len(found) == 32
    assert all(image == expected[seed] for (_, seed), image in found.items())


def test_the_permutation_is_pinned():
    # Never change these. A saved position of a running job is a position in this order: another permutation means
    # that every job resumes at other data. A better algorithm is a new order_version, beside this one.
    assert permutation(10, 7, "web", 0).at(range(10)).tolist() == [4, 1, 2, 6, 9, 0, 5, 8, 3, 7]
    assert permutation(10, 7, "web", 1).at(range(10)).tolist() == [9, 5, 1, 7, 3, 2, 0, 4, 6, 8]
    assert permutation(4096, 0, "web", 0).at([0, 1, 2, 4095]).tolist() == [411, 2789, 2814, 2406]
    assert permutation(4097, 0, "web", 0).at([0, 1, 2, 4096]).tolist() == [2898, 3785, 2757, 1853]
    assert permutation(65_537, 1, "code", 3).at([0, 1, 2, 65_536]).tolist() == [60796, 61850, 17129, 12903]
    assert permutation(10**6, 7, "web", 0).at([0, 1, 2, 999_999]).tolist() == [419126, 245129, 793744, 365345]
    assert permutation(10**12, 7, "web", 0).at([0, 1, 2, 10**12 - 1]).tolist() == [
        894355866709,
        123995508666,
        556350205145,
        853621110920,
    ]
    assert permutation(2**62, 7, "web", 0).at([0, 1, 2, 2**62 - 1]).tolist() == [
        613294695272083271,
        762076118402237114,
        3189161616921185599,
        1784144881444918795,
    ]
