"""Windows, schedules and the code that re-checks them."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.passes.schedule import (
    PoolError,
    Schedule,
    Transfer,
    Window,
    format_bytes,
    least_pool,
    schedule,
    windows_of,
)
from flextensor_fx.passes.verify_schedule import ScheduleError, verify_schedule

CHAIN = tuple(Window(f"w{i}", 10, i, i) for i in range(6))


def spans(windows):
    return [(w.key, w.first_use, w.last_use) for w in windows]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], []),
        ([("a", 8, (3,))], [("a", 3, 3)]),
        ([("a", 8, (3, 0, 3))], [("a", 0, 3)]),
        ([("b", 8, (1,)), ("a", 8, (0,))], [("a", 0, 0), ("b", 1, 1)]),
        ([("b", 8, (1,)), ("a", 8, (1,))], [("b", 1, 1), ("a", 1, 1)]),
        # As many bytes as itself begin in between: it stays. One byte more: it is fetched again.
        ([("tied", 8, (0, 2)), ("a", 8, (1,))], [("tied", 0, 2), ("a", 1, 1)]),
        ([("tied", 8, (0, 2)), ("a", 9, (1,))], [("tied", 0, 0), ("a", 1, 1), ("tied", 2, 2)]),
        # Bytes that begin in the same steps as its own uses do not count.
        ([("tied", 8, (0, 1)), ("a", 99, (0,)), ("b", 99, (1,))], [("tied", 0, 1), ("a", 0, 0), ("b", 1, 1)]),
        # A loop over three weights fetches each one in every round.
        (
            [("a", 8, (0, 3)), ("b", 8, (1, 4)), ("c", 8, (2, 5))],
            [("a", 0, 0), ("b", 1, 1), ("c", 2, 2), ("a", 3, 3), ("b", 4, 4), ("c", 5, 5)],
        ),
        # A loop over two cannot gain by it: what would be freed is less than what it takes to fetch.
        ([("a", 8, (0, 2)), ("b", 8, (1, 3))], [("a", 0, 2), ("b", 1, 3)]),
    ],
)
def test_windows(uses, expected):
    assert spans(windows_of(uses)) == expected


@pytest.mark.parametrize(
    "uses", [[("a", 1, (0,)), ("a", 1, (1,))], [("a", -1, (0,))], [("a", 1, ())], [("a", 1, (-1,))]]
)
def test_windows_refuse_malformed_uses(uses):
    with pytest.raises(ValueError, match="'a'"):
        windows_of(uses)


@pytest.mark.parametrize(
    ("pool", "lookahead", "issues"),
    [
        (10, None, [0, 1, 2, 3, 4, 5]),
        (20, None, [0, 0, 1, 2, 3, 4]),
        (25, None, [0, 0, 1, 2, 3, 4]),
        (60, None, [0, 0, 0, 0, 0, 0]),
        (60, 0, [0, 1, 2, 3, 4, 5]),
        (60, 1, [0, 0, 1, 2, 3, 4]),
        (60, 2, [0, 0, 0, 1, 2, 3]),
        (20, 3, [0, 0, 1, 2, 3, 4]),
    ],
)
def test_issue_steps(pool, lookahead, issues):
    made = verify_schedule(schedule(CHAIN, pool, lookahead), CHAIN)
    assert [t.issue_at for t in made.transfers] == issues


def test_a_large_copy_holds_back_the_small_ones_behind_it():
    windows = [Window("a", 6, 0, 1), Window("big", 8, 3, 3), Window("small", 1, 4, 4)]
    assert [t.issue_at for t in schedule(windows, 10).transfers] == [0, 2, 2]


def test_windows_of_one_step_are_taken_in_the_order_given():
    windows = [Window("b", 1, 2, 2), Window("a", 1, 2, 2), Window("c", 1, 0, 0)]
    assert [t.key for t in schedule(windows, 9).transfers] == ["c", "b", "a"]


def test_least_pool_is_the_least_that_works():
    windows = [Window("a", 5, 0, 2), Window("b", 7, 1, 1), Window("c", 6, 2, 4), Window("d", 6, 3, 3)]
    assert least_pool(windows) == 12
    assert schedule(windows, 12).peak_bytes == 12
    with pytest.raises(PoolError, match=r"at least 12 bytes.*found 11") as error:
        schedule(windows, 11)
    assert error.value.least == 12
    assert least_pool([]) == 0
    assert schedule([], 0).transfers == ()
    with pytest.raises(PoolError):
        schedule([], -1)


def test_negative_lookahead_is_refused():
    with pytest.raises(ValueError, match="lookahead"):
        schedule(CHAIN, 60, -1)


def test_printed_table():
    assert str(schedule(CHAIN[:3], 2048, 1)) == (
        "Schedule: 3 transfers, 30 B; pool 2.00 KiB, peak 20 B, lookahead 1\n"
        "key  bytes  issue_at  first_use  last_use\n"
        "w0    10 B         0          0         0\n"
        "w1    10 B         0          1         1\n"
        "w2    10 B         1          2         2"
    )
    long = str(schedule([Window(f"w{i}", 10, i, i) for i in range(1000)], 20))
    assert len(long.splitlines()) == 15
    assert "... 988 more" in long


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.50 KiB"),
        (123_456_789, "118 MiB"),
        (2**34, "16.0 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


def changed(at, **fields):
    def change(s: Schedule) -> Schedule:
        moves = list(s.transfers)
        moves[at] = dataclasses.replace(moves[at], **fields)
        return dataclasses.replace(s, transfers=tuple(moves))

    return change


def reordered(*order):
    return lambda s: dataclasses.replace(s, transfers=tuple(s.transfers[i] for i in order))


BROKEN = {
    "window without transfer": (reordered(0, 1, 2, 3, 4), "no transfer serves the window of 'w5'"),
    "no transfers at all": (reordered(), "no transfer serves"),
    "served twice": (reordered(0, 1, 2, 2, 3, 4, 5), "has a transfer already"),
    "unknown key": (changed(1, key="other"), "no window asks"),
    "kept too long": (changed(1, last_use=2), "no window asks"),
    "given up too early": (changed(5, last_use=4), "no window asks"),
    "fewer bytes": (changed(2, nbytes=9), "expected 10 bytes"),
    "more bytes": (changed(2, nbytes=11), "expected 10 bytes"),
    "issued after its use": (changed(5, issue_at=6), "issue_at <= first_use"),
    "issued before the call": (changed(0, issue_at=-1), "0 <= issue_at"),
    "used out of order": (reordered(0, 2, 1, 3, 4, 5), "used before the transfer ahead"),
    "issued out of order": (changed(4, issue_at=1), "issued before the transfer ahead"),
    "one step too early": (changed(5, issue_at=3), "hold 30 bytes before step 3, the pool is 20"),
    "pool too small": (lambda s: dataclasses.replace(s, pool=19), "the pool is 19"),
    "looks too far ahead": (lambda s: dataclasses.replace(s, lookahead=0), "1 transfers ahead at step 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_verifier_catches(name):
    change, message = BROKEN[name]
    good = schedule(CHAIN, 20)
    assert verify_schedule(good, CHAIN) is good
    with pytest.raises(ScheduleError, match=message):
        verify_schedule(change(good), CHAIN)


def test_verifier_shows_the_neighbourhood():
    broken = changed(4, issue_at=1)(schedule(CHAIN, 20))
    with pytest.raises(AssertionError) as error:
        verify_schedule(broken, CHAIN)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("verify_schedule: transfer 4 ('w4')")
    assert [line.split(":")[0] for line in lines[1:]] == ["    2", "    3", "  > 4", "    5"]


def test_verifier_rejects_a_window_given_twice():
    with pytest.raises(ScheduleError, match="differ"):
        verify_schedule(schedule(CHAIN, 20), [*CHAIN, CHAIN[0]])


@st.composite
def weights(draw, most=10, steps=12):
    count = draw(st.integers(1, most))
    step = st.integers(0, steps - 1)
    return [
        (f"w{i}", draw(st.integers(1, 60)), tuple(draw(st.lists(step, min_size=1, max_size=4)))) for i in range(count)
    ]


def naive_issue(windows, at, issued, pool, lookahead):
    """issue_at by trying every step, as the definition reads."""
    window = windows[at]
    for step in range(window.first_use + 1):
        held = sum(w.nbytes for w in windows[:at] if w.last_use >= step) + window.nbytes
        late_enough = lookahead is None or at < lookahead or step >= windows[at - lookahead].first_use
        if held <= pool and late_enough and step >= max(issued, default=0):
            return step
    raise AssertionError("no step fits")


@settings(max_examples=150, deadline=None)
@given(weights(), st.integers(0, 120), st.one_of(st.none(), st.integers(0, 4)))
def test_every_schedule_verifies_and_is_as_early_as_can_be(uses, extra, lookahead):
    windows = windows_of(uses)
    for key, _, steps in uses:
        for step in steps:
            assert sum(w.key == key and w.first_use <= step <= w.last_use for w in windows) == 1
    pool = least_pool(windows) + extra
    made = verify_schedule(schedule(windows, pool, lookahead), windows)
    assert made == schedule(windows, pool, lookahead)
    assert made.peak_bytes <= pool
    issued: list[int] = []
    for at in range(len(windows)):
        issued.append(naive_issue(windows, at, issued, pool, lookahead))
    assert [t.issue_at for t in made.transfers] == issued
    if least_pool(windows):
        with pytest.raises(PoolError):
            schedule(windows, least_pool(windows) - 1, lookahead)


@settings(max_examples=100, deadline=None)
@given(weights(), st.data())
def test_verifier_catches_any_transfer_issued_earlier(uses, data):
    windows = windows_of(uses)
    made = schedule(windows, least_pool(windows), 2)
    late = [i for i, t in enumerate(made.transfers) if t.issue_at > 0]
    if late:
        at = data.draw(st.sampled_from(late))
        with pytest.raises(ScheduleError):
            verify_schedule(changed(at, issue_at=made.transfers[at].issue_at - 1)(made), windows)


def test_ten_thousand_weights_take_well_under_a_second():
    uses = [(f"w{i}", 1000 + i % 7, (i, i + 5, (i + 5000) % 10_005)) for i in range(10_000)]
    begin = time.perf_counter()
    windows = windows_of(uses)
    schedule(windows, least_pool(windows) * 2)
    assert time.perf_counter() - begin < 1.5


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CHAIN[0].nbytes = 3  # type: ignore[misc]
    assert not hasattr(Transfer("a", 1, 0, 0, 0), "__dict__")
