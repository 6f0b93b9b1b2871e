"""Times of steps from hand-made events: what is compute and what is a stall, and how stretches are shared out among steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.captured import Costs
from flextensor_fx.graph_times import graph_runs, profile_graphs, read_points
from flextensor_fx.runtime.trace import Event
from flextensor_fx.simulate import Link

LINK = Link(0.0, 100.0, "given")
COSTS = {"g": Costs({"a": (0,), "b": (1,), "c": (3,)}, (1.0, 2.0, 6.0, 1.0), LINK)}
NAMES = {"s:a": "a", "s:b": "b", "s:c": "c", "s:d": "d"}
UNITS = {"a": "A", "b": "B", "c": "C", "d": "D"}


def events(*rows: tuple[float, str, str]) -> list[Event]:
    return [Event(10.0 + ms / 1000, kind, key) for ms, kind, key in rows]  # type: ignore[arg-type]


def run_of(*rows: tuple[float, str, str], total: float = 20.0, graph: str = "g: f32[2]", costs=COSTS):
    (run,) = graph_runs(events((0, "enters", graph), *rows, (total, "leaves", graph)), NAMES, costs)
    return run


def waited(at: float, key: str, *, late: float = 0.0) -> list[tuple[float, str, str]]:
    """A wait to which compute comes at `at`; its weight arrives before, or `late` ms afterwards."""
    kinds = [(at - 0.5, "arrived", key), (at, "waits", key), (at + 0.25, "waited", key)]
    return kinds if not late else [(at, "waits", key), (at + late, "arrived", key), (at + late, "waited", key)]


def stretches(run) -> list[tuple[int, float]]:
    return [(step, round(ms, 6)) for step, ms in run.stretches]


class TestRuns:
    def test_the_way_through_a_wait_in_time_is_compute(self):
        run = run_of(*waited(2, "s:a"), *waited(5, "s:b"))
        assert (run.graph, run.signature) == ("g", "f32[2]")
        assert stretches(run) == [(0, 5.25), (1, 14.75)]
        assert run.stall_ms == 0 and run.total_ms == pytest.approx(20)

    def test_a_late_weight_is_a_stall_from_when_compute_came_to_it(self):
        run = run_of(*waited(2, "s:a", late=3), *waited(9, "s:b", late=1), *waited(12, "s:c"))
        assert stretches(run) == [(0, 6), (1, 2.25), (3, 7.75)]
        assert run.stall_ms == pytest.approx(4)

    def test_a_weight_that_arrives_just_as_compute_comes_is_in_time(self):
        run = run_of((2, "arrived", "s:a"), (2, "waits", "s:a"), (3, "waited", "s:a"))
        assert stretches(run) == [(0, 20)] and run.stall_ms == 0

    def test_one_step_may_wait_for_several(self):
        costs = {"g": Costs({"a": (1,), "b": (1,), "c": (2,)}, (1.0, 1.0, 1.0), LINK)}
        run = run_of(*waited(2, "s:a", late=1), *waited(3, "s:b", late=2), *waited(8, "s:c"), costs=costs)
        assert stretches(run) == [(0, 2), (1, 3.25), (2, 11.75)]
        assert run.stall_ms == pytest.approx(3)

    def test_a_tied_weight_fetched_twice_marks_both_of_its_steps(self):
        costs = {"g": Costs({"a": (0, 2), "b": (1,)}, (1.0, 1.0, 1.0), LINK)}
        run = run_of(*waited(2, "s:a"), *waited(5, "s:b"), *waited(9, "s:a", late=2), costs=costs)
        assert stretches(run) == [(0, 5.25), (1, 3.75), (2, 9)]
        assert run.stall_ms == pytest.approx(2)

    def test_waits_out_of_order_do_not_go_back(self):
        run = run_of(*waited(2, "s:b"), *waited(5, "s:a"))
        assert stretches(run) == [(0, 2.25), (1, 17.75)]

    def test_a_weight_read_again_after_a_write_is_late(self):
        run = run_of((1, "arrived", "s:a"), (2, "waits", "s:a"), (6, "arrived", "s:a"), (6, "waited", "s:a"))
        assert stretches(run) == [(0, 16)] and run.stall_ms == pytest.approx(4)

    def test_a_wait_for_a_weight_that_no_step_uses_counts_on(self):
        assert stretches(run_of(*waited(2, "s:d"), *waited(4, "x:y"), *waited(6, "s:b"))) == [(0, 6.25), (1, 13.75)]

    def test_graphs_and_classes_of_shapes_are_told_apart(self):
        rows = [(0, "enters", "g: f32[2]"), (3, "leaves", "g: f32[2]"), (3, "enters", "h: "), (4, "leaves", "h: "),
                (5, "enters", "g: f32[4], i64[1]"), (9, "leaves", "g: f32[4], i64[1]")]  # fmt: skip
        both = COSTS | {"h": Costs({"d": (0,)}, (1.0,), LINK)}
        runs = graph_runs(events(*rows), NAMES, both)
        assert [(r.graph, r.signature, round(r.total_ms, 6)) for r in runs] == [
            ("g", "f32[2]", 3), ("h", "", 1), ("g", "f32[4], i64[1]", 4),
        ]  # fmt: skip
        assert [r.graph for r in graph_runs(events(*rows), NAMES, COSTS)] == ["g", "g"]

    def test_a_call_that_failed_is_left_out(self):
        rows = [
            (0, "enters", "g: x"),
            (1, "waits", "s:a"),
            (2, "enters", "g: x"),
            (5, "leaves", "g: x"),
            (6, "leaves", "g: x"),
        ]
        (run,) = graph_runs(events(*rows), NAMES, COSTS)
        assert run.total_ms == pytest.approx(3)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["issued", "read", "arrived", "waits", "waited", "enters", "leaves"]),
                              st.sampled_from(["s:a", "s:b", "s:c", "x", "g: s"]))))  # fmt: skip
    def test_compute_and_stalls_make_the_whole_run(self, rows: list[tuple[str, str]]):
        made = events(*((float(n), kind, key) for n, (kind, key) in enumerate(rows)))
        for run in graph_runs(made, NAMES, COSTS):
            assert math.fsum(ms for _, ms in run.stretches) + run.stall_ms == pytest.approx(run.total_ms)
            assert all(ms >= -1e-9 for _, ms in run.stretches)
            firsts = [first for first, _ in run.stretches]
            assert firsts[0] == 0 and firsts == sorted(set(firsts))


class TestProfiles:
    def test_medians_and_their_spread(self):
        runs = [run_of(*waited(2 + n, "s:a"), *waited(5 + n, "s:b"), *waited(6 + n, "s:c")) for n in (0, 1, 3)]
        (found,) = profile_graphs(runs, COSTS, UNITS)
        assert (found.name, found.signature, found.samples) == ("g", "f32[2]", 3)
        assert [step.ms for step in found.steps] == pytest.approx([6.25, 0.25, 0.75, 12.75])
        assert [step.spread for step in found.steps] == pytest.approx([1 / 6.25, 0, 0, 1 / 12.75])
        assert {step.provenance for step in found.steps} == {"measured"}
        assert found.uses == COSTS["g"].steps_of

    def test_steps_add_up_to_the_median_run(self):
        runs = [
            run_of(*waited(4, "s:a"), *waited(8 + a, "s:b"), *waited(12 + a + b, "s:c"), total=20 + a + b + c)
            for a, b, c in ((4, 0, 0), (0, 4, 0), (0, 0, 4))
        ]
        (found,) = profile_graphs(runs, COSTS, UNITS)
        assert found.compute_ms == pytest.approx(24)
        assert [step.ms for step in found.steps] == pytest.approx(
            [24 / 20 * ms for ms in (8.25, 4 * 2 / 8, 4 * 6 / 8, 7.75)]
        )

    def test_a_stretch_is_shared_out_as_the_estimates_say(self):
        (found,) = profile_graphs([run_of(*waited(5, "s:b"))], COSTS, UNITS)
        assert [step.ms for step in found.steps] == pytest.approx([5.25, *(14.75 * part / 9 for part in (2, 6, 1))])
        assert found.compute_ms == pytest.approx(20)

    def test_where_nothing_is_estimated_the_shares_are_equal(self):
        costs = {"g": Costs({"a": (0,)}, (0.0, 0.0), LINK)}
        (found,) = profile_graphs([run_of(costs=costs)], costs, UNITS)
        assert [step.ms for step in found.steps] == pytest.approx([10, 10])

    def test_a_disturbed_run_counts_for_the_total_of_no_step(self):
        usual = [run_of(*waited(4, "s:a"), *waited(8, "s:b"), *waited(12, "s:c")) for _ in range(2)]
        disturbed = run_of(*waited(4, "s:a"), *waited(90, "s:c"), total=100)
        (found,) = profile_graphs([usual[0], disturbed, usual[1]], COSTS, UNITS)
        assert found.compute_ms == pytest.approx(20) and found.samples == 2

    def test_each_graph_and_class_has_its_own(self):
        costs = COSTS | {"h": Costs({"d": (0,)}, (1.0,), LINK)}
        runs = [run_of(total=3), run_of(total=5, graph="g: f32[4]"), run_of(total=7, graph="h: ", costs=costs)]
        found = profile_graphs(runs, costs, UNITS)
        assert [(g.name, g.signature, round(g.call_ms)) for g in found] == [
            ("g", "f32[2]", 3), ("g", "f32[4]", 5), ("h", "", 7),
        ]  # fmt: skip

    def test_what_never_ran_is_estimated_if_nothing_else_tells_of_its_weights(self):
        costs = COSTS | {"h": Costs({"d": (0,)}, (3.0,), LINK)}
        measured, estimated = profile_graphs([run_of()], costs, UNITS)
        assert measured.name == "g" and {step.provenance for step in measured.steps} == {"measured"}
        assert (estimated.name, estimated.signature, estimated.samples) == ("h", "", 0)
        assert [(s.unit, s.ms, s.spread, s.provenance) for s in estimated.steps] == [("D", 3.0, 0.0, "estimated")]
        assert (estimated.call_ms, estimated.stall_ms) == (3.0, 0.0)

    def test_a_graph_that_another_one_took_the_place_of_is_left_out(self):
        costs = {"old": COSTS["g"], **COSTS}
        assert [graph.name for graph in profile_graphs([run_of()], costs, UNITS)] == ["g"]
        assert [graph.name for graph in profile_graphs([], costs, UNITS)] == ["old", "g"]

    def test_a_step_without_a_selected_weight_belongs_to_the_unit_before(self):
        (found,) = profile_graphs([run_of()], COSTS, UNITS)
        assert [step.unit for step in found.steps] == ["A", "B", "B", "C"]


SIZES = {"s:a": 100, "s:b": 100, "s:c": 300}


class TestReads:
    def test_means_of_rounds_by_size(self):
        rows = [(0, "read", "s:a"), (2, "arrived", "s:a"), (2, "read", "s:b"), (3, "read", "s:c"), (6, "arrived", "s:b"),
                (9, "arrived", "s:c"), (10, "read", "s:a"), (14, "arrived", "s:a")]  # fmt: skip
        small, large = read_points(events(*rows), SIZES)
        assert (small.nbytes, large.nbytes) == (100, 300)
        assert (small.ms, large.ms) == (pytest.approx(3.5), pytest.approx(6))  # rounds of (2 + 4) / 2 and of 4
        assert small.spread == pytest.approx(0.5 / 3.5) and large.spread == 0

    def test_one_weight_that_is_always_slow_counts_and_one_slow_round_does_not(self):
        rows, at = [], 0.0
        for a, b in ((1, 4), (1, 4), (90, 4)):
            rows += [
                (at, "read", "s:a"),
                (at + a, "arrived", "s:a"),
                (at + a, "read", "s:b"),
                (at + a + b, "arrived", "s:b"),
            ]
            at += a + b
        (point,) = read_points(events(*rows), SIZES)
        assert point.ms == pytest.approx(2.5)

    def test_reads_cut_off_and_unknown_keys_are_left_out(self):
        rows = [(0, "arrived", "s:a"), (1, "read", "s:b"), (2, "read", "x"), (3, "arrived", "x")]
        assert read_points(events(*rows), SIZES) == []

    def test_a_read_that_takes_no_time_is_still_a_point(self):
        (point,) = read_points(events((1, "read", "s:a"), (1, "arrived", "s:a")), SIZES)
        assert point.ms > 0
