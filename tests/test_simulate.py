"""The discrete-event run of one call."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.passes.schedule import Schedule, Transfer, Window, least_pool, schedule
from flextensor_fx.simulate import Link, simulate

LINK = Link(latency_ms=1.0, bytes_per_ms=10.0, provenance="made up")


def chain(*issues):
    return Schedule(tuple(Transfer(f"w{i}", 10, issue, i, i) for i, issue in enumerate(issues)), 100)


@pytest.mark.parametrize(
    ("moves", "step_ms", "total", "stalls"),
    [
        (chain(), [3.0, 4.0], 7.0, []),
        (chain(0), [3.0], 5.0, [2.0]),  # nothing to hide behind
        (chain(0, 1), [3.0, 3.0], 10.0, [2.0, 2.0]),  # no overlap: each copy waits for the step before
        (chain(0, 0), [3.0, 3.0], 8.0, [2.0, 0.0]),  # the second copy hides behind the first step
        (chain(0, 0, 0), [1.0, 1.0, 1.0], 7.0, [2.0, 1.0, 1.0]),  # the link is the bottleneck
        (chain(0, 0, 1), [1.0, 5.0, 1.0], 10.0, [2.0, 1.0, 0.0]),
        (chain(0), [], None, None),
        (Schedule((Transfer("a", 0, 2, 2, 2),), 1), [1.0, 1.0, 1.0], 4.0, [1.0]),  # latency alone
        (Schedule((Transfer("a", 10, 0, 1, 1), Transfer("b", 20, 0, 1, 1)), 99), [1.0, 1.0], 6.0, [1.0, 3.0]),
    ],
)
def test_cases(moves, step_ms, total, stalls):
    if total is None:
        with pytest.raises(ValueError, match="'w0' is used in step 0, but there are 0 steps"):
            simulate(moves, step_ms, LINK)
        return
    run = simulate(moves, step_ms, LINK)
    assert run.total_ms == pytest.approx(total)
    assert [t.stall_ms for t in run.transfers] == pytest.approx(stalls)
    assert run.stall_ms == pytest.approx(sum(stalls))
    assert run.peak_bytes == moves.peak_bytes


def test_printed_table():
    assert str(simulate(chain(0, 0), [3.0, 3.0], LINK)) == (
        "Run: 8.000 ms, stalled 2.000 ms, peak 20 B\n"
        "key  start_ms  end_ms  stall_ms\n"
        "w0      0.000   2.000     2.000\n"
        "w1      2.000   4.000     0.000"
    )


@pytest.mark.parametrize(("latency", "rate"), [(-1.0, 1.0), (0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0)])
def test_impossible_links_are_refused(latency, rate):
    with pytest.raises(ValueError, match="Link"):
        Link(latency, rate, "made up")


def naive_run(moves, step_ms, link):
    """Advance the copies and the steps side by side, as the docstring reads."""
    finished: list[float] = []
    ends: dict[int, float] = {}
    link_free = now = 0.0

    def copy_what_may_start(step):
        nonlocal link_free
        for at, t in enumerate(moves.transfers):
            if at not in ends and t.issue_at <= step:
                begin = max(link_free, finished[t.issue_at - 1] if t.issue_at else 0.0)
                ends[at] = link_free = begin + link.copy_ms(t.nbytes)

    for step, ms in enumerate(step_ms):
        copy_what_may_start(step)
        now = max([now, *(ends[at] for at, t in enumerate(moves.transfers) if t.first_use == step)]) + ms
        finished.append(now)
    return now


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9), st.integers(0, 3)), max_size=9),
    st.lists(st.floats(0, 5), min_size=13, max_size=13),
    st.integers(0, 90),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_agrees_with_a_naive_run(spans, step_ms, extra, lookahead):
    windows = [Window(f"w{i}", n, first, first + more) for i, (n, first, more) in enumerate(spans)]
    moves = schedule(windows, least_pool(windows) + extra, lookahead)
    run = simulate(moves, step_ms, LINK)
    assert run.total_ms == pytest.approx(naive_run(moves, step_ms, LINK))
    assert run.total_ms == pytest.approx(sum(step_ms) + run.stall_ms)
    for before, after in zip(run.transfers, run.transfers[1:], strict=False):
        assert before.end_ms <= after.start_ms
