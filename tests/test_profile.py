"""Profiles: what they refuse, what they say about a model and a machine, and that they plan as the planner does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.errors import BudgetError, OffloadError, ProfileError
from flextensor_fx.planner import plan
from flextensor_fx.profile import (
    GraphProfile,
    LinkPoint,
    LinkProfile,
    Machine,
    Profile,
    ProfiledWeight,
    StepProfile,
    fit_link,
)
from flextensor_fx.simulate import Link
from profiles import MACHINE, MIB, model_profile

STEP = StepProfile("layers.0", 1.0, 0.0, "estimated")
LINK = LinkProfile.of(Link(0.1, 1e6, "estimated"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is none that a profile could be from."""
    monkeypatch.setattr(
        Machine, "here", staticmethod(lambda device="cpu": replace(MACHINE, name="loud", device=device))
    )


def weight(name: str, nbytes: int = 64) -> ProfiledWeight:
    return ProfiledWeight(name, "", nbytes, (nbytes // 4,), "torch.float32", False, None)


class TestValues:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: StepProfile("", -1.0, 0.0, "measured"), "expected ms >= 0 and spread >= 0"),
            (lambda: StepProfile("", float("nan"), 0.0, "measured"), "both finite"),
            (lambda: StepProfile("", 1.0, float("inf"), "measured"), "both finite"),
            (lambda: StepProfile("", 1.0, 0.1, "estimated"), "expected no spread where nothing was measured"),
            (lambda: StepProfile("", 1.0, 0.0, "guessed"), "measured or estimated, found 'guessed'"),
            (lambda: GraphProfile("g", "", (STEP,), {"w": ()}, 1.0, 0.0, 1), "weight 'w' to have steps, each once"),
            (lambda: GraphProfile("g", "", (STEP,), {"w": (0, 0)}, 1.0, 0.0, 1), "each once, found"),
            (lambda: GraphProfile("g", "", (STEP,), {"w": (1,)}, 1.0, 0.0, 1), "among 0 to 0, found"),
            (lambda: GraphProfile("g", "", (STEP,), {"w": (-1,)}, 1.0, 0.0, 1), "among 0 to 0, found"),
            (lambda: GraphProfile("g", "", (STEP,), {}, float("nan"), 0.0, 1), "call_ms, stall_ms and samples"),
            (lambda: GraphProfile("g", "", (STEP,), {}, 1.0, 0.0, -1), "of at least 0"),
            (lambda: weight("w", -4), "bytes and extents of at least 0"),
            (lambda: replace(weight("w"), shape=(-1,)), "bytes and extents of at least 0"),
            (lambda: replace(MACHINE, cores=0), "cores >= 1"),
            (lambda: LinkPoint(0, 1.0, 0.0), "nbytes >= 1"),
            (lambda: LinkPoint(1, 0.0, 0.0), "ms >= 1e-09"),
            (lambda: replace(LINK, bytes_per_ms=0.5), "bytes_per_ms >= 1"),
            (lambda: replace(LINK, latency_ms=float("nan")), "latency_ms >= 0"),
            (lambda: replace(LINK, points=(LinkPoint(2, 1.0, 0.0),) * 2), "points of increasing size"),
            (lambda: Profile("M", MACHINE, (weight("w"),) * 2, (), LINK), "each weight once, found weight 'w' 2 times"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_is_refused(self, make, message: str):
        with pytest.raises(ProfileError, match=message):
            make()

    def test_graphs_that_are_the_same_or_use_what_is_not_there(self):
        graph = GraphProfile("g", "[2]", (STEP,), {"w": (0,)}, 1.0, 0.0, 1)
        with pytest.raises(ProfileError, match=r"found graph 'g' for '\[2\]' 2 times"):
            Profile("M", MACHINE, (weight("w"),), (graph, graph), LINK)
        with pytest.raises(ProfileError, match="uses weight 'w', which is not among the 1 weights"):
            Profile("M", MACHINE, (weight("v"),), (graph,), LINK)
        both = (graph, replace(graph, signature="[3]"))
        assert Profile("M", MACHINE, (weight("w"),), both, LINK).graphs == both

    def test_a_graph_keeps_its_own_uses(self):
        uses = {"w": (0,)}
        graph = GraphProfile("g", "", (STEP,), uses, 1.0, 0.0, 1)
        uses["v"] = (7,)
        assert graph.uses == {"w": (0,)}
        with pytest.raises(TypeError):
            graph.uses["v"] = (0,)  # pyright: ignore[reportIndexIssue]


class TestMachine:
    def test_here(self):
        here = Machine.here()
        assert here.cores >= 1 and here.memory_bytes > 1 << 28 and here.device == "cpu"
        assert not replace(model_profile(1), machine=here).foreign
        assert not replace(model_profile(1), machine=replace(here, torch="1.0", memory_bytes=1)).foreign

    @pytest.mark.parametrize("change", [{"name": "other"}, {"cores": 4096}, {"device": "abacus:0"}])
    def test_another_machine_is_foreign(self, change: dict):
        made = replace(model_profile(1), machine=replace(Machine.here(), **change))
        assert made.foreign and made.machine.unlike_here() == (*change,)
        assert f"this machine differs in {next(iter(change))}" in str(made)


class TestFits:
    def test_it_fits_its_own_model_in_any_order(self):
        made = model_profile(3)
        made.check_fits(made.weights[::-1], "2.13.0", "cpu")
        changed = [replace(w, unit="all", fused=True, stays=None) for w in made.weights]
        made.check_fits(changed, "2.13.0", "cpu")

    @pytest.mark.parametrize(
        ("change", "torch", "device", "message"),
        [
            (lambda w: w[1:], "2.13.0", "cpu", "expected weight 'layers.0.up.weight', found no such weight among those selected"),
            (lambda w: (*w, weight("extra")), "2.13.0", "cpu", "expected 4 weights, found also 'extra'"),
            (lambda w: (replace(w[0], shape=(1536, 1024)), *w[1:]), "2.13.0", "cpu",
             r"'layers.0.up.weight' to have shape \(1024, 1536\), found \(1536, 1024\)"),
            (lambda w: (replace(w[0], dtype="torch.int32"), *w[1:]), "2.13.0", "cpu", "dtype torch.float32, found torch.int32"),
            (lambda w: (replace(w[0], nbytes=1), *w[1:]), "2.13.0", "cpu", "to have nbytes 6291456, found 1"),
            (lambda w: w, "2.14.0", "cpu", "expected torch 2.13.0, found 2.14.0"),
            (lambda w: w, "2.13.0", "cuda:0", "expected device 'cpu', found 'cuda:0'"),
        ],
    )  # fmt: skip
    def test_the_first_difference_is_named(self, change, torch: str, device: str, message: str):
        made = model_profile(1)
        with pytest.raises(ProfileError, match=f"profile of Model: .*{message}; profile again"):
            made.check_fits(change(made.weights), torch, device)

    def test_the_fingerprint_hangs_on_what_the_model_is(self):
        made = model_profile(2)
        first = made.weights[0]
        same = [
            replace(made, weights=made.weights[::-1], graphs=()),
            replace(made, machine=Machine.here(), link=LINK),
            replace(made, weights=(replace(first, fused=True, stays="it must", unit="u"), *made.weights[1:])),
        ]
        others = [
            replace(made, model="Other"),
            replace(made, weights=made.weights[1:], graphs=()),
            replace(made, weights=(replace(first, shape=(1536, 1024)), *made.weights[1:])),
            replace(made, weights=(replace(first, dtype="torch.int32"), *made.weights[1:])),
        ]
        assert {other.fingerprint for other in same} == {made.fingerprint}
        assert len({other.fingerprint for other in [made, *others]}) == 5


class TestPlans:
    def test_graphs_follow_one_another(self):
        made = model_profile(2, graphs=2)
        uses, step_ms = made.joined()
        steps_of = {name: steps for name, _, steps in uses}
        assert steps_of["layers.0.up.weight"] == (0, 7) and steps_of["layers.1.norm.weight"] == (5,)
        assert steps_of["head.weight"] == (6,) and step_ms == [3.2, 2.0, 0.1] * 2 + [1.0] + [3.2, 2.0, 0.1]
        assert [(name, nbytes) for name, nbytes, _ in uses] == [(w.name, w.nbytes) for w in made.weights]

    def test_weights_that_no_graph_uses_come_last(self):
        made = Profile("M", MACHINE, (weight("a"), weight("b", 1_000_000), weight("c")), (
            GraphProfile("g", "", (STEP, STEP), {"c": (1, 0)}, 2.0, 0.0, 0),), LINK)  # fmt: skip
        uses, step_ms = made.joined()
        assert uses == [("a", 64, (2,)), ("b", 1_000_000, (3,)), ("c", 64, (0, 1))]
        assert step_ms == [1.0, 1.0, LINK.link.copy_ms(64), 1.1]
        assert made.joined(Link(7.0, 1e9, "given"))[1][2:] == [7.0 + 64e-9, 7.0 + 1e-3]
        assert "unused     2 weights, 977 KiB, by no graph" in str(made)

    @settings(max_examples=30, deadline=None)
    @given(
        st.integers(10 * MIB, 120 * MIB) | st.none(),
        st.sampled_from(["single", "steady"]),
        st.sampled_from([None, 0, 3]),
        st.sampled_from([None, 0, 5 * MIB]),
    )
    def test_a_plan_is_the_planners(self, budget, objective, lookahead, least):
        made = model_profile(6, graphs=2)
        uses, step_ms = made.joined()
        options = {"objective": objective, "lookahead": lookahead, "min_stream_bytes": least}
        fixed = frozenset({"head.weight"})
        fused = frozenset(f"layers.{n}.norm.weight" for n in range(6))

        def outcome(call):
            try:
                return call()
            except BudgetError as error:
                return error.least

        expected = outcome(lambda: plan(uses, step_ms, made.link.link, budget, fixed=fixed, fused=fused, **options))
        assert outcome(lambda: made.plan(budget, **options)) == expected

    def test_another_link_changes_the_plan(self):
        made = model_profile(6)
        slow, fast = (made.plan(30 * MIB, link=Link(0.006, rate, "given")) for rate in (1e5, 25e6))
        assert fast.predicted_stall_ms < 1 < slow.predicted_stall_ms

    def test_what_must_stay_stays_and_a_budget_below_it_is_refused(self):
        made = model_profile(6)
        assert "head.weight" in made.plan(9 * MIB).resident
        with pytest.raises(BudgetError, match="must stay resident"):
            made.plan(2 * MIB)
        with pytest.raises(ValueError, match="lookahead must be at least 0"):
            made.plan(9 * MIB, lookahead=-1)


class TestLinkFit:
    @settings(max_examples=60, deadline=None)
    @given(
        st.floats(0, 5),
        st.floats(1e3, 1e9),
        st.lists(st.integers(1, 1 << 30), min_size=2, max_size=10, unique=True),
    )
    def test_points_on_a_line_give_the_line(self, latency: float, rate: float, sizes: list[int]):
        line = Link(latency, rate, "made up")
        points = [LinkPoint(n, line.copy_ms(n), 0.0) for n in sizes if line.copy_ms(n) > 1e-9]
        if points:
            made = fit_link(points, "measured")
            assert made.provenance == made.link.provenance == "measured"
            assert all(made.link.copy_ms(p.nbytes) == pytest.approx(p.ms, rel=2e-3) for p in points)

    @settings(max_examples=100, deadline=None)
    @given(st.dictionaries(st.integers(1, 1 << 40), st.floats(1e-9, 1e9), min_size=1, max_size=10))
    def test_any_times_give_a_link(self, ms_of: dict[int, float]):
        made = fit_link([LinkPoint(n, ms, 0.0) for n, ms in ms_of.items()], "measured")
        assert made.latency_ms >= 0 and made.bytes_per_ms > 0
        assert [p.nbytes for p in made.points] == sorted(ms_of)

    @pytest.mark.parametrize("disturbed", range(8))
    def test_one_disturbed_size_does_not_matter(self, disturbed: int):
        points = [LinkPoint(4096 << 2 * n, 0.1 + (4096 << 2 * n) / 2e6, 0.01) for n in range(8)]
        points[disturbed] = replace(points[disturbed], ms=points[disturbed].ms * 4)
        made = fit_link(points, "measured")
        assert (made.latency_ms, made.bytes_per_ms) == (pytest.approx(0.1), pytest.approx(2e6))

    def test_times_that_do_not_grow_are_latency(self):
        made = fit_link([LinkPoint(n, 2.0, 0.0) for n in (10, 1000, 100_000)], "measured")
        assert made.latency_ms == pytest.approx(2.0, rel=1e-2) and made.link.copy_ms(100_000) < 2.01

    def test_nothing_and_one_size_twice_are_refused(self):
        with pytest.raises(ProfileError, match="at least one size"):
            fit_link([], "measured")
        with pytest.raises(ProfileError, match="expected each size once, found 3 bytes twice"):
            fit_link([LinkPoint(3, 1.0, 0.0), LinkPoint(2, 1.0, 0.0), LinkPoint(3, 2.0, 0.0)], "measured")


class TestText:
    @pytest.mark.usefixtures("elsewhere")
    def test_profile_text(self, golden):
        golden(f"{model_profile(3, graphs=2)}\n\n{model_profile(1, measured=False)}\n\n{model_profile(1).link}\n")

    def test_a_thousand_units_fit_a_screen(self):
        text = str(model_profile(1000))
        assert "... 989 more" in text and len(text.splitlines()) < 40

    def test_no_graphs(self):
        text = str(replace(model_profile(1), graphs=()))
        assert "unused     4 weights" in text and "graph " not in text.replace("no graph", "")


class TestFiles:
    @pytest.mark.parametrize("units", [1, 12])
    def test_json_round_trip(self, tmp_path: Path, units: int):
        made = model_profile(units, graphs=2)
        made.save(tmp_path / "profile.json")
        again = Profile.load(tmp_path / "profile.json")
        assert again == made and str(again) == str(made) and again.plan(None) == made.plan(None)

    def test_a_folder_that_is_not_there(self, tmp_path: Path):
        with pytest.raises(ProfileError, match=r"profile file .* cannot be written: No such file"):
            model_profile(1).save(tmp_path / "nowhere" / "profile.json")
        with pytest.raises(ProfileError, match=r"profile file .* cannot be read: No such file"):
            Profile.load(tmp_path / "profile.json")
        assert issubclass(ProfileError, OffloadError)
