"""The steady objective: calls that repeat, and fetch for one another."""

from __future__ import annotations

import dataclasses
import random
from itertools import accumulate, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.errors import BudgetError
from flextensor_fx.orbit import INFEASIBLE, Orbit
from flextensor_fx.passes.schedule import PoolError, Transfer, Window
from flextensor_fx.passes.steady_schedule import (
    SteadySchedule,
    circular_windows,
    least_steady_pool,
    most_together,
    steady_schedule,
)
from flextensor_fx.passes.verify_schedule import ScheduleError
from flextensor_fx.passes.verify_steady import verify_steady
from flextensor_fx.planner import plan
from flextensor_fx.simulate import Link
from flextensor_fx.steady import issue_late, simulate_steady

LINK = Link(latency_ms=0.1, bytes_per_ms=100.0, provenance="made up")
SLOW = Link(latency_ms=0.1, bytes_per_ms=20.0, provenance="made up")
CHAIN = [Window(f"w{i}", 10, i, i) for i in range(6)]


def layers(count, nbytes=100):
    return [(f"l{i}", nbytes, (i,)) for i in range(count)]


# --- windows and schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uses", "steps", "expected"),
    [
        ([], 3, []),
        ([("a", 8, (3,))], 4, [("a", 3, 3)]),
        # Used at both ends with nothing in between across the end: it stays, and leaves in the next call.
        ([("tied", 8, (0, 5)), *((f"l{i}", 9, (i,)) for i in range(1, 5))], 6,
         [("l1", 1, 1), ("l2", 2, 2), ("l3", 3, 3), ("l4", 4, 4), ("tied", 5, 6)]),
        # Never given up by the rule, so given up where the call ends.
        ([("a", 8, (0, 2))], 4, [("a", 0, 2)]),
        ([("a", 8, (0, 1, 2, 3))], 4, [("a", 0, 3)]),
    ],
)  # fmt: skip
def test_circular_windows(uses, steps, expected):
    assert [(w.key, w.first_use, w.last_use) for w in circular_windows(uses, steps)] == expected


@pytest.mark.parametrize("uses", [[("a", 1, (9,))], [("a", 1, ())], [("a", 1, (0,)), ("a", 1, (1,))]])
def test_circular_windows_refuse_malformed_uses(uses):
    with pytest.raises(ValueError, match="'a'"):
        circular_windows(uses, 9)


@pytest.mark.parametrize(
    ("pool", "lookahead", "issues"),
    [
        (10, None, [0, 1, 2, 3, 4, 5]),
        (20, None, [-1, 0, 1, 2, 3, 4]),
        (29, None, [-1, 0, 1, 2, 3, 4]),
        (50, None, [-4, -3, -2, -1, 0, 1]),
        (99, None, [-5, -4, -3, -2, -1, 0]),  # no earlier than its own last use
        (99, 0, [0, 1, 2, 3, 4, 5]),
        (99, 2, [-2, -1, 0, 1, 2, 3]),
    ],
)
def test_issue_steps(pool, lookahead, issues):
    made = verify_steady(steady_schedule(CHAIN, 6, pool, lookahead), CHAIN)
    assert [t.issue_at for t in made.transfers] == issues
    assert [t.key for t in made.wrapping] == [f"w{i}" for i in range(sum(issue < 0 for issue in issues))]


def test_too_small_a_pool_is_refused_with_the_least():
    windows = [Window("a", 5, 0, 0), Window("b", 7, 3, 4)]  # b is still there in step 0
    assert least_steady_pool(windows, 4) == 12
    with pytest.raises(PoolError, match=r"at least 12 bytes.*found 11") as error:
        steady_schedule(windows, 4, 11)
    assert error.value.least == 12
    with pytest.raises(ValueError, match="lookahead"):
        steady_schedule(windows, 4, 12, -1)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [([], 0), ([(0, 3, 5)], 5), ([(-1, 0, 5), (3, 3, 2)], 7), ([(0, 4, 5)], 10), ([(0, 7, 5)], 10), ([(-3, 6, 5)], 15)],
)
def test_most_together(spans, expected):
    assert most_together(spans, 4) == expected


def test_printed_table():
    assert str(steady_schedule(CHAIN[:2], 2, 20)) == (
        "SteadySchedule: 2 transfers a call of 2 steps, 20 B, 1 across its end; pool 20 B, peak 20 B, "
        "lookahead as the pool allows\n"
        "key  bytes  issue_at  first_use  last_use\n"
        "w0    10 B        -1          0         0\n"
        "w1    10 B         0          1         1"
    )


# --- the verifier ------------------------------------------------------------------------------------------------------


def changed(at, **fields):
    def change(s: SteadySchedule) -> SteadySchedule:
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
    "kept into the next call": (changed(5, last_use=6), "no window asks"),
    "fewer bytes": (changed(2, nbytes=9), "expected 10 bytes"),
    "more bytes": (changed(2, nbytes=11), "expected 10 bytes"),
    "issued after its use": (changed(5, issue_at=6), "issue_at <= first_use"),
    "issued a call too early": (changed(0, issue_at=-6), "< issue_at"),
    "used out of order": (reordered(0, 2, 1, 3, 4, 5), "out of order"),
    "issued out of order": (changed(4, issue_at=0), "out of order"),
    "last one behind the first of the next call": (changed(0, issue_at=-3), "out of order"),
    "one step too early": (changed(5, issue_at=3), "hold 30 bytes before step"),
    "too early across the end of the call": (changed(0, issue_at=-2), "hold 30 bytes before step"),
    "pool too small": (lambda s: dataclasses.replace(s, pool=19), "the pool is 19"),
    "looks too far ahead": (lambda s: dataclasses.replace(s, lookahead=0), "1 transfers ahead"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_verifier_catches(name):
    change, message = BROKEN[name]
    good = steady_schedule(CHAIN, 6, 20)
    assert verify_steady(good, CHAIN) is good
    with pytest.raises(ScheduleError, match=message):
        verify_steady(change(good), CHAIN)


def test_verifier_catches_a_weight_that_is_there_twice():
    windows = [Window("a", 1, 0, 1), Window("a", 1, 3, 4)]
    twice = SteadySchedule((Transfer("a", 1, 0, 0, 1), Transfer("a", 1, 1, 3, 4)), 6, 9)
    with pytest.raises(ScheduleError, match="still on the device"):
        verify_steady(twice, windows)


# --- the run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "step_ms", "link", "period"),
    [
        (20, [2.0] * 6, Link(0, 10, ""), 12.0),  # each copy of 1 ms hides behind the step before, also the first one's
        (10, [2.0] * 6, Link(0, 10, ""), 18.0),  # one buffer: copy and step take turns
        (20, [2.0] * 6, Link(0, 4, ""), 15.0),  # the link is the bottleneck: 6 copies of 2.5 ms
        (20, [6.0, 0.0, 0.0, 0.0, 0.0, 0.0], Link(0, 10, ""), 11.0),  # two buffers: one copy hides behind the long step
        (60, [6.0, 0.0, 0.0, 0.0, 0.0, 0.0], Link(0, 10, ""), 7.0),
    ],
)
def test_period(pool, step_ms, link, period):
    run = simulate_steady(steady_schedule(CHAIN, 6, pool), step_ms, link)
    assert run.period_ms == pytest.approx(period)
    assert run.stall_ms == pytest.approx(period - sum(step_ms))
    assert sum(t.stall_ms for t in run.transfers) == pytest.approx(run.stall_ms)


def test_another_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="the schedule has 6 steps, but step_ms has 5"):
        simulate_steady(steady_schedule(CHAIN, 6, 20), [1.0] * 5, LINK)


def unrolled_period(schedule, step_ms, link, calls=60):
    """Mean of many calls, each event from its definition."""
    n = len(step_ms)
    moves = [(t.issue_at + c * n, t.first_use + c * n, t.nbytes) for c in range(calls) for t in schedule.transfers]
    needed: dict[int, list[int]] = {}
    for at, (_, first, _) in enumerate(moves):
        needed.setdefault(first, []).append(at)
    finished: list[float] = []
    arrived: list[float] = []
    link_free = now = 0.0
    for step in range(calls * n):
        for at in needed.get(step, ()):
            issue = moves[at][0]
            link_free = max(link_free, finished[issue - 1] if issue > 0 else 0.0) + link.copy_ms(moves[at][2])
            arrived.append(link_free)
            now = max(now, link_free)
        now += step_ms[step % n]
        finished.append(now)
    half = calls // 2
    return (finished[-1] - finished[half * n - 1]) / (calls - half)


@st.composite
def problems(draw, most=10, steps=10):
    n = draw(st.integers(1, steps))
    step = st.integers(0, n - 1)
    count = draw(st.integers(1, most))
    uses = [
        (f"w{i}", draw(st.integers(1, 300)), tuple(draw(st.lists(step, min_size=1, max_size=2)))) for i in range(count)
    ]
    step_ms = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=n, max_size=n))
    return uses, step_ms, draw(st.sampled_from([LINK, SLOW])), draw(st.floats(0, 1))


@settings(max_examples=80, deadline=None)
@given(problems(), st.one_of(st.none(), st.integers(0, 3)))
def test_schedules_verify_and_repeat_with_the_simulated_period(problem, lookahead):
    uses, step_ms, link, share = problem
    windows = circular_windows(uses, len(step_ms))
    for key, _, steps in uses:
        for step in steps:
            within = [
                w for w in windows if w.key == key and (step - w.first_use) % len(step_ms) <= w.last_use - w.first_use
            ]
            assert len(within) == 1
    pool = least_steady_pool(windows, len(step_ms)) + int(share * sum(w.nbytes for w in windows))
    made = verify_steady(steady_schedule(windows, len(step_ms), pool, lookahead), windows)
    run = simulate_steady(made, step_ms, link)
    assert run.period_ms == pytest.approx(unrolled_period(made, step_ms, link), rel=1e-6, abs=1e-6)
    late = verify_steady(issue_late(made, step_ms, link), windows)
    assert simulate_steady(late, step_ms, link).period_ms <= run.period_ms * (1 + 1e-9)
    assert late.peak_bytes <= made.peak_bytes
    assert all(b.issue_at >= a.issue_at for a, b in zip(made.transfers, late.transfers, strict=True))


@settings(max_examples=60, deadline=None)
@given(problems(most=14, steps=14), st.data())
def test_an_orbit_follows_every_change_exactly(problem, data):
    uses, step_ms, link, share = problem
    uses = [(key, nbytes, steps[:1]) for key, nbytes, steps in uses]
    windows = circular_windows(uses, len(step_ms))
    total = sum(w.nbytes for w in windows)
    pool = max(w.nbytes for w in windows) + int(share * total / 2)
    orbit = Orbit(
        [w.first_use for w in windows],
        [w.last_use for w in windows],
        [w.nbytes for w in windows],
        [link.copy_ms(w.nbytes) for w in windows],
        [0.0, *accumulate(step_ms)],
        pool,
        [True] * len(windows),
    )
    if orbit.period == INFEASIBLE:
        return
    for _ in range(4):
        changes = data.draw(st.sets(st.integers(0, len(windows) - 1), min_size=1, max_size=3))
        on = [orbit.on[i] != (i in changes) for i in range(len(windows))]
        streamed = [w for w, yes in zip(windows, on, strict=True) if yes]
        if sum(w.nbytes for w in streamed) <= pool:
            continue
        before = orbit.period
        change = orbit.toggle(changes)
        assert orbit.on == on or change == INFEASIBLE
        if least_steady_pool(streamed, len(step_ms)) > pool:
            assert change == INFEASIBLE
        else:
            run = simulate_steady(steady_schedule(streamed, len(step_ms), pool), step_ms, link)
            assert before + change == pytest.approx(run.period_ms, rel=1e-6, abs=1e-6)


# --- plans -------------------------------------------------------------------------------------------------------------


def test_the_first_weight_streams_like_any_other():
    made = plan(layers(8), [2.0] * 8, LINK, 200, objective="steady")
    assert (made.resident, made.pool, made.predicted_ms, made.gap) == (frozenset(), 200, 16.0, 0.0)
    assert made.wrapping == ("l0",)
    assert made.why["l0"] == "streamed: hidden behind step 7 of the call before"
    assert "0.0% above the bound; 1 weights across calls: l0" in str(made)
    assert plan(layers(8), [2.0] * 8, LINK, 200).predicted_ms == pytest.approx(17.1)


def test_edges():
    assert plan(layers(4), [1.0] * 4, LINK, 400, objective="steady").streamed == ()
    assert plan([], [1.0], LINK, 0, objective="steady").predicted_ms == 1.0
    free = plan(layers(10), [2.0] * 10, LINK, None, objective="steady")
    assert (free.pool, free.predicted_ms, len(free.streamed)) == (200, 20.0, 10)
    kept = plan(layers(4), [1.0] * 4, LINK, 250, fixed=frozenset({"l3"}), objective="steady")
    assert "l3" in kept.resident
    assert plan(layers(8), [1.0] * 8, LINK, 500, least_pool_bytes=350, objective="steady").pool >= 350
    with pytest.raises(BudgetError) as error:
        plan([("a", 3000, (0,)), ("b", 3000, (0,)), ("c", 5000, (1,))], [1.0, 1.0], LINK, 5999, objective="steady")
    assert error.value.least == 6000
    with pytest.raises(ValueError, match="objective"):
        plan(layers(2), [1.0] * 2, LINK, 100, objective="fast")  # pyright: ignore[reportArgumentType]


def test_late_issue_holds_less():
    early = plan(layers(12), [4.0] * 12, LINK, 800, objective="steady")
    late = plan(layers(12), [4.0] * 12, LINK, 800, objective="steady", late=True)
    assert early.steady is not None
    assert late.steady is not None
    assert late.predicted_ms == early.predicted_ms
    assert sum(t.first_use - t.issue_at for t in late.steady.transfers) <= sum(
        t.first_use - t.issue_at for t in early.steady.transfers
    )


def simple_periods(uses, step_ms, link, budget):
    """Plans anyone would try first, where they fit."""
    order = sorted(uses, key=lambda use: min(use[2]))
    n = len(step_ms)
    for kept, lookahead in product(range(len(order) + 1), (0, 2)):
        pool = budget - sum(nbytes for _, nbytes, _ in order[:kept])
        streamed = [
            use for use in uses if use in order[kept:]
        ]  # weights of one step in the order that `plan` takes them
        try:
            made = steady_schedule(circular_windows(streamed, n), n, pool, lookahead)
        except PoolError:
            continue
        yield simulate_steady(made, step_ms, link).period_ms


@settings(max_examples=40, deadline=None)
@given(problems())
def test_budget_held_and_never_slower_than_simple_policies(problem):
    uses, step_ms, link, share = problem
    total = sum(nbytes for _, nbytes, _ in uses)
    least = plan(uses, step_ms, link, total, min_stream_bytes=0, objective="steady").least_budget
    budget = least + int(share * (total - least))
    made = plan(uses, step_ms, link, budget, min_stream_bytes=0, objective="steady")
    assert made == plan(uses, step_ms, link, budget, min_stream_bytes=0, objective="steady")
    assert made.resident | set(made.streamed) == {key for key, _, _ in uses}
    held = sum(n for key, n, _ in uses if key in made.resident)
    assert held + made.pool == made.peak_bytes <= budget
    assert made.steady is not None
    for step in range(3 * len(step_ms), 4 * len(step_ms)):  # bytes alive at each step of the fourth of seven calls
        alive = sum(
            t.nbytes
            for t in made.steady.transfers
            for call in range(7)
            if t.issue_at <= step - call * len(step_ms) <= t.last_use
        )
        assert held + alive <= budget
    assert made.lower_bound_ms <= made.predicted_ms
    assert made.predicted_ms <= min(simple_periods(uses, step_ms, link, budget)) * 1.0001 + 1e-6


def tiny_cases():
    dice = random.Random(11)
    for _ in range(24):
        count = dice.randint(3, 7)
        uses = [(f"w{i}", dice.choice([20, 50, 100, 200, 300]), (i,)) for i in range(count)]
        yield (
            uses,
            [dice.choice([0.2, 1.0, 3.0]) for _ in range(count)],
            dice.choice([LINK, SLOW]),
            dice.choice([0.4, 0.6, 0.8]),
        )


def test_close_to_the_optimum_on_tiny_cases():
    ratios = []
    for uses, step_ms, link, share in tiny_cases():
        sizes = [nbytes for _, nbytes, _ in uses]
        budget = max(*sizes, int(share * sum(sizes)))
        best = float("inf")
        for size in range(len(uses) + 1):
            for kept in combinations(uses, size):
                pool = budget - sum(nbytes for _, nbytes, _ in kept)
                windows = circular_windows([u for u in uses if u not in kept], len(uses))
                if least_steady_pool(windows, len(uses)) <= pool:
                    made = steady_schedule(windows, len(uses), pool)
                    best = min(best, simulate_steady(made, step_ms, link).period_ms)
        made = plan(uses, step_ms, link, budget, min_stream_bytes=0, objective="steady")
        assert made.lower_bound_ms <= best + 1e-9
        ratios.append(made.predicted_ms / best)
    assert sum(ratios) / len(ratios) < 1.005
    assert max(ratios) < 1.05


def test_the_pool_that_a_graph_needs_is_kept_by_every_set_that_is_tried() -> None:
    sizes = (512, 64, 512, 1024, 512, 512, 512)
    uses = [("table", 4096, (0, 8)), *((f"b{n}", nbytes, (n,)) for n, nbytes in enumerate(sizes, 1))]
    made = plan(uses, [0.001] * 9, Link(0.005, 5e6, "made up"), 7293, objective="steady", least_pool_bytes=4904)
    assert made.pool >= 4904
    assert made.peak_bytes <= 7293
