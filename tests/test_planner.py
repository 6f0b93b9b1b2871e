"""Residency and pool under a budget."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.bounds import lower_bound
from flextensor_fx.errors import BudgetError
from flextensor_fx.passes.schedule import PoolError, schedule, windows_of
from flextensor_fx.passes.verify_schedule import verify_schedule
from flextensor_fx.planner import plan
from flextensor_fx.simulate import Link, simulate

LINK = Link(latency_ms=0.1, bytes_per_ms=100.0, provenance="made up")
SLOW = Link(latency_ms=0.1, bytes_per_ms=10.0, provenance="made up")
MB = 1_000_000


def layers(count, nbytes=100):
    return [(f"l{i}", nbytes, (i,)) for i in range(count)]


def run_of(uses, step_ms, link, streamed, pool, lookahead=None):
    return simulate(schedule(windows_of([u for u in uses if u[0] in streamed]), pool, lookahead), step_ms, link)


def test_everything_resident_where_it_fits():
    made = plan(layers(4), [1.0] * 4, LINK, 400)
    assert (made.resident, made.streamed, made.pool) == (frozenset({"l0", "l1", "l2", "l3"}), (), 0)
    assert (made.predicted_ms, made.predicted_stall_ms, made.peak_bytes) == (4.0, 0.0, 400)
    assert set(made.why.values()) == {"resident: the budget holds every weight"}


def test_the_first_weights_stay_and_the_rest_hides():
    made = plan(layers(8), [2.0] * 8, LINK, 300)
    assert made.predicted_stall_ms == 0
    assert made.resident == {"l0"}
    assert made.pool == 200
    assert made.why["l0"] == "resident: used in step 0, too early for its first copy to hide"
    assert made.why["l1"] == "streamed: hidden behind step 0"


def test_no_budget_streams_all_through_the_smallest_pool_that_keeps_the_overlap():
    uses, step_ms = layers(10), [2.0] * 10
    made = plan(uses, step_ms, LINK, None)
    assert made.streamed == tuple(f"l{i}" for i in range(10))
    assert (made.pool, made.peak_bytes, made.budget) == (200, 200, None)
    free = run_of(uses, step_ms, LINK, made.streamed, 1000).total_ms
    assert made.predicted_ms <= 1.02 * free
    assert run_of(uses, step_ms, LINK, made.streamed, 199).total_ms > 1.02 * free


def test_small_weights_stay_until_the_budget_needs_them():
    uses = [*layers(4, MB), ("tiny", 20_000, (4,)), ("less", 10_000, (5,)), ("none", 0, (3,))]
    fast = Link(0.1, MB, "made up")
    made = plan(uses, [2.0] * 6, fast, 2 * MB)
    assert {"tiny", "less", "none"} <= made.resident
    assert made.why["tiny"] == "resident: 19.5 KiB costs more to move than to keep"
    assert made.why["none"] == "resident: empty"
    tight = plan(uses, [2.0] * 6, fast, MB + 25_000)
    assert "tiny" in tight.streamed
    assert "less" in tight.resident
    with pytest.raises(BudgetError) as error:
        plan(uses, [2.0] * 6, fast, MB + 25_000, min_stream_bytes=20_001)
    assert error.value.least == MB + 30_000
    assert set(plan(uses, [2.0] * 6, fast, None, min_stream_bytes=0).streamed) == {u[0] for u in uses[:-1]}
    assert plan(uses, [2.0] * 6, fast, None, min_stream_bytes=2 * MB).streamed == ()


def test_weights_fused_into_loops_stay_until_the_budget_needs_them():
    uses, fused = [*layers(4, MB), ("decay", MB, (4,)), ("tiny", 20_000, (5,))], frozenset({"decay"})
    total = sum(nbytes for _, nbytes, _ in uses)
    for budget in (None, total - 1, 2 * MB + 20_000):
        made = plan(uses, [1.0] * 6, LINK, budget, fused=fused)
        assert "decay" in made.resident
    assert made.why["decay"] == "resident: elementwise work alone reads it, and is fused with what comes before"
    least = plan(uses, [1.0] * 6, LINK, made.least_budget, fused=fused)
    assert least.least_budget == MB
    assert least.resident == frozenset()


@pytest.mark.parametrize("objective", ["single", "steady"])
def test_activations_take_their_part_of_the_budget(objective):
    uses, step_ms = layers(8), [2.0] * 8
    alone = plan(uses, step_ms, LINK, 300, objective=objective)
    made = plan(uses, step_ms, LINK, 1000, activation_bytes=700, objective=objective)
    assert (made.resident, made.streamed, made.pool) == (alone.resident, alone.streamed, alone.pool)
    assert (made.budget, made.peak_bytes) == (1000, alone.peak_bytes + 700)
    assert made.least_budget == alone.least_budget + 700
    assert "activations 700 B, within the budget" in str(made) and "activations" not in str(alone)
    free = plan(uses, step_ms, LINK, None, activation_bytes=700, objective=objective)
    assert (
        free.budget is None and free.peak_bytes == plan(uses, step_ms, LINK, None, objective=objective).peak_bytes + 700
    )
    least = alone.least_budget + 700
    with pytest.raises(BudgetError, match=f"at least {least} bytes.*activations take 700") as error:
        plan(uses, step_ms, LINK, least - 1, activation_bytes=700, objective=objective)
    assert error.value.least == least
    plan(uses, step_ms, LINK, least, activation_bytes=700, objective=objective)
    with pytest.raises(ValueError, match="activation_bytes must be at least 0, found -1"):
        plan(uses, step_ms, LINK, 300, activation_bytes=-1)


def test_fixed_weights_stay_and_count():
    made = plan(layers(4), [1.0] * 4, LINK, 250, fixed=frozenset({"l3"}))
    assert "l3" in made.resident
    assert made.why["l3"] == "resident: required to stay"
    assert made.least_budget == 200
    with pytest.raises(BudgetError):
        plan(layers(4), [1.0] * 4, LINK, 199, fixed=frozenset({"l3"}))


def test_too_small_a_budget_is_refused_with_the_least():
    uses = [("a", 3000, (0,)), ("b", 3000, (0,)), ("c", 5000, (1,))]
    with pytest.raises(BudgetError) as error:
        plan(uses, [1.0, 1.0], LINK, 5999)
    assert error.value.least == 6000
    assert str(error.value) == (
        "plan: expected a budget of at least 6000 bytes (5.86 KiB), found 5999 (5.86 KiB); 0 bytes (0 B) must stay resident "
        "and the weights that one step needs together take 6000 (5.86 KiB), the largest weight being 'c' with 5000 (4.88 KiB); "
        "raise the budget"
    )
    assert plan(uses, [1.0, 1.0], LINK, 6000).peak_bytes == 6000


@pytest.mark.parametrize(
    ("uses", "options", "message"),
    [
        ([("a", 1, (2,))], {}, "'a' is used in step 2, but step_ms has 2"),
        ([("a", 1, ())], {}, "'a' has steps"),
        ([("a", 1, (0,)), ("a", 1, (1,))], {}, "listed twice"),
        ([("a", 1, (0,))], {"fixed": frozenset({"z"})}, "'z', which is not among"),
        ([("a", 1, (0,))], {"lookahead": -1}, "lookahead"),
    ],
)
def test_malformed_arguments_are_refused(uses, options, message):
    with pytest.raises(ValueError, match=message):
        plan(uses, [1.0, 1.0], LINK, 10, **options)


def test_no_weights_at_all():
    for budget in (None, 0):
        made = plan([], [1.0], LINK, budget)
        assert (made.pool, made.least_budget, made.predicted_ms, made.streamed) == (0, 0, 1.0, ())


def test_a_weight_used_far_apart_is_fetched_again():
    uses = [("tied", 50, (0, 5)), *((f"l{i}", 100, (i,)) for i in range(1, 5))]
    made = plan(uses, [9.0] * 6, LINK, None, min_stream_bytes=0)
    assert made.why["tied"] == "streamed 2 times: step 0 waits 0.600 ms for it"


GOLDEN = """\
Plan: budget 1.46 KiB, takes 1.46 KiB; least budget 500 B
  resident   1 weights, 500 B
  streamed   3 weights, 1.46 KiB, through a pool of 0.98 KiB
  predicted  20.000 ms, of it 0.000 ms stalled; lower bound 20.000 ms
key  why
l0   resident: used in step 0, too early for its first copy to hide
l1   streamed: hidden behind step 0
l2   streamed: hidden behind steps 0 to 1
l3   streamed: hidden behind step 2"""


def test_printed_table():
    assert str(plan(layers(4, 500), [5.5, 5.5, 5.5, 3.5], LINK, 1500)) == GOLDEN
    assert len(str(plan(layers(1000), [1.0] * 1000, LINK, 5000)).splitlines()) == 18


def simple_policies(uses, step_ms, link, budget):
    """Times of plans anyone would try first, where they fit."""
    order = sorted(uses, key=lambda use: min(use[2]))

    def attempt(kept, lookahead):
        pool = budget - sum(nbytes for _, nbytes, _ in order[:kept])
        try:
            return run_of(uses, step_ms, link, {key for key, _, _ in order[kept:]}, pool, lookahead).total_ms
        except PoolError:
            return None

    for lookahead in (2, 0):
        yield attempt(0, lookahead)
        yield next((t for kept in range(len(order), -1, -1) if (t := attempt(kept, lookahead)) is not None), None)


@st.composite
def problems(draw):
    steps = draw(st.integers(1, 14))
    step = st.integers(0, steps - 1)
    uses = [
        (f"w{i}", draw(st.integers(0, 300)), tuple(draw(st.lists(step, min_size=1, max_size=3))))
        for i in range(draw(st.integers(1, 14)))
    ]
    step_ms = draw(st.lists(st.floats(0, 5), min_size=steps, max_size=steps))
    return uses, step_ms, draw(st.sampled_from([LINK, SLOW])), draw(st.floats(0, 1))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_budget_held_and_never_slower_than_simple_policies(problem):
    uses, step_ms, link, share = problem
    total = sum(nbytes for _, nbytes, _ in uses)
    least = plan(uses, step_ms, link, total, min_stream_bytes=0).least_budget
    budget = least + int(share * (total - least))
    made = plan(uses, step_ms, link, budget, min_stream_bytes=0)
    assert made == plan(uses, step_ms, link, budget, min_stream_bytes=0)
    assert made.resident | set(made.streamed) == {key for key, _, _ in uses}
    assert not made.resident & set(made.streamed)
    assert made.peak_bytes == sum(n for key, n, _ in uses if key in made.resident) + made.pool <= budget
    streamed = [use for use in uses if use[0] in made.streamed]
    assert made.pool >= max((nbytes for _, nbytes, _ in streamed), default=0)
    windows = windows_of(streamed)
    run = simulate(verify_schedule(schedule(windows, made.pool), windows), step_ms, link)
    assert (run.total_ms, run.stall_ms) == (made.predicted_ms, made.predicted_stall_ms)
    assert made.lower_bound_ms <= made.predicted_ms + 1e-9
    for time_ms in simple_policies(uses, step_ms, link, budget):
        assert time_ms is None or made.predicted_ms <= time_ms * 1.0001 + 1e-6
    assert list(made.why) == [key for key, _, _ in uses]


@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from([None, 0, 100]), st.booleans())
def test_least_budget_is_where_plan_begins_to_succeed(problem, min_stream_bytes, pin):
    uses, step_ms, link, _ = problem
    options = {"min_stream_bytes": min_stream_bytes, "fixed": frozenset({"w0"} if pin else ())}

    def succeeds(budget):
        try:
            return plan(uses, step_ms, link, budget, **options).peak_bytes <= budget
        except BudgetError:
            return False

    low, high = -1, sum(nbytes for _, nbytes, _ in uses)
    reported = plan(uses, step_ms, link, high, **options).least_budget
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if succeeds(middle) else (middle, high)
    assert high == reported
    assert plan(uses, step_ms, link, None, **options).least_budget == reported


def tiny_cases():
    dice = random.Random(7)
    for _ in range(60):
        count = dice.randint(3, 8)
        uses: list[tuple[str, int, tuple[int, ...]]] = [
            (f"w{i}", dice.choice([20, 50, 100, 200, 300]), (i,)) for i in range(count)
        ]
        if dice.random() < 0.4:
            uses[0] = ("w0", uses[0][1], (0, count - 1))
        step_ms = [dice.choice([0.2, 1.0, 3.0]) for _ in range(count)]
        yield uses, step_ms, dice.choice([LINK, SLOW]), dice.choice([0.2, 0.4, 0.6, 0.8])


def test_close_to_the_optimum_on_tiny_cases():
    ratios = []
    for uses, step_ms, link, share in tiny_cases():
        total = sum(nbytes for _, nbytes, _ in uses)
        least = plan(uses, step_ms, link, total, min_stream_bytes=0).least_budget
        budget = max(least, int(share * total))
        best = float("inf")
        for size in range(len(uses) + 1):
            for kept in combinations(uses, size):
                pool = budget - sum(nbytes for _, nbytes, _ in kept)
                try:
                    streamed = {key for key, _, _ in uses} - {key for key, _, _ in kept}
                    best = min(best, run_of(uses, step_ms, link, streamed, pool).total_ms)
                except PoolError:
                    continue
        made = plan(uses, step_ms, link, budget, min_stream_bytes=0)
        assert made.lower_bound_ms <= best + 1e-9
        ratios.append(made.predicted_ms / best)
    assert sum(ratios) / len(ratios) < 1.01
    assert max(ratios) < 1.10


@pytest.mark.parametrize(
    ("excess", "expected"),
    [(0, 8.0), (-100, 8.0), (100, 8.0)],  # 800 bytes in 8 steps of 1 ms; one copy of 100 bytes takes 1.1 ms
)
def test_lower_bound_where_compute_dominates(excess, expected):
    assert lower_bound([100] * 8, [1.1] * 8, [1.0] * 8, range(8), 800 - excess, 8.0) == pytest.approx(expected)


def test_lower_bound_where_the_link_dominates():
    # 300 bytes stay and pool, so with h = 100 at least 600 must move: 6 copies of 10.1 ms.
    assert lower_bound([100] * 8, [10.1] * 8, [1.0] * 8, range(8), 300, 8.0) >= 60.59


def test_a_thousand_weights_take_well_under_a_second():
    dice = random.Random(1)
    uses = [(f"l{i}", dice.choice([MB, 4 * MB, 9 * MB]), (i,)) for i in range(1000)]
    step_ms = [dice.uniform(0.01, 1.0) for _ in uses]
    link = Link(0.01, 2 * sum(nbytes for _, nbytes, _ in uses) / sum(step_ms) / 3, "made up")
    begin = time.process_time()  # of this process alone, as the machine may be busy
    made = plan(uses, step_ms, link, sum(nbytes for _, nbytes, _ in uses) // 4)
    assert time.process_time() - begin < 2.0
    assert made.predicted_ms < 1.05 * made.lower_bound_ms
