from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiling import assert_equal, fresh_compiler, mlp, session_of, stream
from flextensor_fx.errors import OffloadError
from flextensor_fx.passes.schedule import Schedule, Transfer, least_pool, schedule, windows_of
from flextensor_fx.recording import Weight, measured_timeline, record_call
from flextensor_fx.runtime.trace import Event, Recorder
from flextensor_fx.simulate import Link, simulate
from flextensor_fx.timeline import (
    ComputeSpan,
    Level,
    Stall,
    Timeline,
    TransferSpan,
    UnitTimes,
    lanes,
    levels,
    predicted_timeline,
)

assert fresh_compiler

LINK = Link(0.0, 100.0, "given")
MOVES = (Transfer("a", 200, 0, 1, 1), Transfer("b", 400, 2, 2, 3))


class TestPredicted:
    def test_spans_stalls_and_memory(self):
        found = predicted_timeline(Schedule(MOVES, 600), (1.0, 3.0, 2.0, 1.0), LINK, ("-", "A", "B", "B"), 50, 700)
        assert found.compute == (ComputeSpan(0.0, 1.0, "-"), ComputeSpan(2.0, 5.0, "A"), ComputeSpan(9.0, 12.0, "B"))
        assert found.transfers == (TransferSpan(0.0, 2.0, "a", "A", 200), TransferSpan(5.0, 9.0, "b", "B", 400))
        assert found.stalls == (Stall(1.0, 2.0, "a"), Stall(5.0, 9.0, "b"))
        assert found.memory == (Level(0.0, 250), Level(5.0, 450), Level(12.0, 50))
        assert (found.total_ms, found.peak_bytes, found.budget_bytes) == (12.0, 450, 700)

    def test_it_prints(self, golden):
        made = predicted_timeline(Schedule(MOVES, 600), (1.0, 3.0, 2.0, 1.0), LINK, ("-", "A", "B", "B"), 50, 700)
        golden(f"{made}\n")

    def test_labels_must_be_one_per_step(self):
        with pytest.raises(ValueError, match="a label for each of 2 steps, found 1"):
            predicted_timeline(Schedule((), 0), (1.0, 2.0), LINK, ("A",), 0, None)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_it_is_the_simulated_call(self, data: st.DataObject):
        steps = data.draw(st.integers(1, 12))
        step_ms = data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=steps, max_size=steps))
        some_steps = st.lists(st.integers(0, steps - 1), min_size=1, max_size=3, unique=True)
        weights = data.draw(st.lists(st.tuples(st.integers(1, 900), some_steps), max_size=8))
        windows = windows_of([(f"w{n}", nbytes, tuple(sorted(at))) for n, (nbytes, at) in enumerate(weights)])
        made = schedule(
            windows, least_pool(windows) + data.draw(st.integers(0, 900)), data.draw(st.sampled_from([None, 0, 2]))
        )
        link = Link(0.1, 300.0, "given")
        run = simulate(made, step_ms, link)
        found = predicted_timeline(made, step_ms, link, [str(n) for n in range(steps)], 7, None)
        assert found.total_ms == run.total_ms
        assert found.stall_ms == pytest.approx(run.stall_ms)
        assert found.compute_ms + found.stall_ms == pytest.approx(run.total_ms)
        assert found.peak_bytes <= 7 + made.peak_bytes
        assert found.memory[-1].nbytes == 7
        busy = sorted([*found.compute, *found.stalls], key=lambda s: (s.start_ms, s.end_ms))
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in pairwise(busy))
        assert set(lanes(found.transfers)) <= {0}


def events(*rows: tuple[float, str, str]) -> list[Event]:
    return [Event(10.0 + ms / 1000, kind, key) for ms, kind, key in rows]  # type: ignore[arg-type]


WEIGHTS = {"s:a": Weight("a", "A", 200), "s:b": Weight("b", "B", 400)}


def measure(*rows: tuple[float, str, str], total: float = 10.0) -> Timeline:
    return measured_timeline(events(*rows), 10.0, 10.0 + total / 1000, WEIGHTS, resident_bytes=50, budget=700)


def rounded(spans):
    return [tuple(round(v, 6) if isinstance(v, float) else v for v in vars_of(span)) for span in spans]


def vars_of(span):
    return [getattr(span, name) for name in span.__slots__]


class TestMeasured:
    def test_a_weight_in_time_and_one_that_is_late(self):
        found = measure(
            (0, "issued", "s:a"), (0, "taken", "s:a"), (0, "read", "s:a"), (1, "issued", "s:b"), (1, "taken", "s:b"),
            (2, "arrived", "s:a"), (2, "read", "s:b"), (3, "waits", "s:a"), (3, "waited", "s:a"), (5, "waits", "s:b"),
            (6, "arrived", "s:b"), (7, "waited", "s:b"), (7, "offloaded", "s:a"), (9, "offloaded", "s:b"),
        )  # fmt: skip
        assert rounded(found.compute) == [(0, 3, "(start)"), (3, 5, "A"), (7, 10, "B")]
        assert rounded(found.transfers) == [(0, 2, "a", "A", 200), (2, 6, "b", "B", 400)]
        assert rounded(found.stalls) == [(5, 7, "b")]
        assert rounded(found.memory) == [(0, 250), (1, 650), (7, 450), (9, 50)]
        assert {unit: round(t.stall_ms, 6) for unit, t in found.by_unit().items()} == {"(start)": 0, "A": 0, "B": 2}

    def test_a_weight_fetched_twice_is_two_transfers(self):
        once = [(0, "issued"), (0, "taken"), (0, "read"), (1, "arrived"), (1, "waits"), (1, "waited"), (2, "offloaded")]
        found = measure(*((at + shift, kind, "s:a") for shift in (0.0, 4.0) for at, kind in once))
        assert rounded(found.transfers) == [(0, 1, "a", "A", 200), (4, 5, "a", "A", 200)]
        assert found.peak_bytes == 250 and found.memory[-1].nbytes == 50

    def test_a_weight_read_again_while_compute_waits(self):
        found = measure(
            (0, "issued", "s:a"), (0, "taken", "s:a"), (0, "read", "s:a"), (1, "arrived", "s:a"),
            (2, "waits", "s:a"), (2, "read", "s:a"), (4, "arrived", "s:a"), (4, "waited", "s:a"),
        )  # fmt: skip
        assert rounded(found.transfers) == [(0, 1, "a", "A", 200), (2, 4, "a", "A", 200)]
        assert rounded(found.stalls) == [(2, 4, "a")]

    def test_a_copy_that_the_call_before_began_and_one_for_the_call_after(self):
        found = measure(
            (-5, "issued", "s:a"), (-5, "taken", "s:a"), (-4, "read", "s:a"), (-3, "issued", "s:b"), (-3, "taken", "s:b"),
            (1, "arrived", "s:a"), (2, "waits", "s:a"), (2, "waited", "s:a"), (3, "waits", "s:b"), (3, "waited", "s:b"),
            (5, "offloaded", "s:a"), (6, "issued", "s:a"), (6, "taken", "s:a"), (7, "offloaded", "s:b"),
            (8, "read", "s:a"), (11, "arrived", "s:a"),
        )  # fmt: skip
        assert rounded(found.transfers) == [
            (0, 1, "a", "A", 200)
        ]  # b had arrived before, the second a does so afterwards
        assert found.stalls == ()
        assert rounded(found.memory) == [(0, 650), (5, 450), (6, 650), (7, 250)]

    def test_a_copy_for_the_call_after_that_makes_room(self):
        found = measure(
            (-5, "issued", "s:a"), (-5, "taken", "s:a"), (1, "issued", "s:b"), (1, "dropped", "s:a"), (1, "taken", "s:b"),
            (1, "read", "s:b"), (2, "issued", "s:a"), (2, "waits", "s:b"), (3, "arrived", "s:b"), (3, "waited", "s:b"),
            (4, "offloaded", "s:b"), (4, "taken", "s:a"), (4, "read", "s:a"), (5, "arrived", "s:a"), (5, "waits", "s:a"),
            (5, "waited", "s:a"), (6, "offloaded", "s:a"),
        )  # fmt: skip
        assert rounded(found.memory) == [(0, 250), (1, 450), (4, 250), (6, 50)]
        assert [span.key for span in found.transfers] == ["b", "a"]

    def test_a_call_without_transfers_is_all_compute(self):
        found = measure()
        assert rounded(found.compute) == [(0, 10, "(start)")] and found.memory == (Level(0.0, 50),)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["issued", "taken", "read", "arrived", "waits", "waited", "offloaded", "dropped"]),
                              st.sampled_from(["s:a", "s:b", "t:x"]))))  # fmt: skip
    def test_events_of_a_call_that_failed_make_a_timeline_too(self, rows: list[tuple[str, str]]):
        measure(*((float(n), kind, key) for n, (kind, key) in enumerate(rows)), total=100.0)


class TestTimeline:
    @pytest.mark.parametrize(
        "wrong",
        [{"total_ms": float("nan")}, {"compute": (ComputeSpan(2.0, 1.0, "A"),)}, {"memory": ()}, {"resident_bytes": -1},
         {"memory": (Level(0.0, -1),)}, {"stalls": (Stall(0.0, float("inf"), "a"),)}],
    )  # fmt: skip
    def test_it_refuses_what_no_call_can_be(self, wrong):
        right = {"name": "n", "provenance": "measured", "source": "s", "total_ms": 1.0, "budget_bytes": None,
                 "resident_bytes": 0, "compute": (), "transfers": (), "stalls": (), "memory": (Level(0.0, 0),)}  # fmt: skip
        assert Timeline(**right).by_unit() == {}
        with pytest.raises(ValueError, match="timeline 'n': expected"):
            Timeline(**right | wrong)

    def test_levels_at_one_moment_are_one(self):
        assert levels([(1.0, 5), (1.0, -5), (0.0, 3), (2.0, -3)], 1) == (Level(0.0, 4), Level(2.0, 1))

    def test_lanes_part_what_overlaps(self):
        spans = [TransferSpan(a, b, "k", "u", 1) for a, b in ((0, 4), (1, 2), (2, 5), (4, 6), (4.5, 5))]
        assert lanes(spans) == [0, 1, 1, 0, 2]

    def test_unit_times_default_to_nothing(self):
        assert UnitTimes() == UnitTimes(0.0, 0.0, 0.0)


class TestRecordCall:
    def test_a_recorded_call_gives_the_numbers_and_the_timeline(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("FLEXTENSOR_FX_TEST_DELAY_MS", "5")
        model = mlp(4, bias=False)
        x = torch.randn(2, 16)
        with torch.no_grad():
            expected = model(x)
            compiled = stream(model)
            compiled(x)
            made = record_call(compiled, x)
            assert_equal(compiled(x), expected)
        assert {span.key for span in made.transfers} == {"0.weight", "2.weight", "4.weight", "6.weight"}
        assert {span.unit for span in made.transfers} == {"0", "2", "4", "6"}
        assert made.stall_ms >= 4.0  # the first weight is 5 ms late, and nothing computes before it
        assert made.compute_ms + made.stall_ms == pytest.approx(made.total_ms)
        assert made.resident_bytes == 0 and made.memory[-1].nbytes == 0
        assert made.peak_bytes <= session_of(model).plan.peak_bytes
        assert session_of(model).engine.recorder is None

    def test_only_what_happens_within_a_trace_is_noted(self):
        compiled = stream(mlp(2, bias=False))
        x = torch.randn(2, 16)
        with torch.no_grad():
            compiled(x)
            with session_of(compiled).engine.trace() as recorder:
                compiled(x)
            noted = len(recorder.events())
            compiled(x)
        kinds = [event.kind for event in recorder.events() if event.key.endswith("0.weight")]
        assert len(recorder.events()) == noted
        assert sorted(kinds) == sorted(["issued", "taken", "read", "arrived", "waits", "waited", "offloaded"])

    def test_a_model_that_is_not_offloaded_is_refused(self):
        with pytest.raises(
            OffloadError, match=r"record_call: expected Sequential to belong to one offloaded model, found none"
        ):
            record_call(mlp(1), torch.randn(1, 16))

    def test_events_come_in_order_of_time(self):
        recorder = Recorder()
        recorder.note("read", "k", 2.0)
        recorder.note("issued", "k", 1.0)
        assert [event.at_s for event in recorder.events()] == [1.0, 2.0]
