from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flextensor_fx
from compiling import fresh_compiler, mlp, stream
from flextensor_fx.errors import OffloadError, ReportError
from flextensor_fx.passes.schedule import format_bytes
from flextensor_fx.recording import record_call
from flextensor_fx.report import Report
from flextensor_fx.report_html import report_to_html
from flextensor_fx.report_trace import report_to_trace
from reports import JSON_VALUES, model_report, paths, put, without

assert fresh_compiler

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'<!--."


class TestText:
    def test_report_text(self, golden):
        golden(f"{model_report(4)}\n")

    def test_report_text_without_a_measured_call(self):
        text = str(model_report(4, measured=False))
        assert "  predicted   " in text and "measured" not in text


class TestOfAModel:
    def test_the_predicted_timeline_is_the_plans_and_a_recorded_one_stands_beside_it(self, tmp_path: Path):
        compiled = stream(mlp(6), budget="60%")
        x = torch.randn(2, 16)
        with torch.no_grad():
            compiled(x)
            recorded = record_call(compiled, x)
        made = flextensor_fx.report(compiled, measured=recorded)
        predicted = made.timeline("predicted")
        assert predicted is not None and made.timeline("measured") is recorded
        assert predicted.total_ms == pytest.approx(made.plan.predicted_ms)
        assert predicted.stall_ms == pytest.approx(made.plan.predicted_stall_ms)
        assert predicted.resident_bytes == recorded.resident_bytes == made.resident_bytes
        assert made.budget is not None and max(predicted.peak_bytes, recorded.peak_bytes) <= made.budget
        assert {span.unit for span in predicted.transfers} == {span.unit for span in recorded.transfers}
        assert Report.from_json(made.to_json()) == made
        made.save(tmp_path / "run.html")
        made.save(tmp_path / "run.perfetto.json")

    def test_a_model_without_transfers(self):
        compiled = stream(mlp(2), budget="100%")
        with torch.no_grad():
            compiled(torch.randn(2, 16))
            made = flextensor_fx.report(compiled)
            with pytest.raises(OffloadError, match="all stay in memory"):
                record_call(compiled, torch.randn(2, 16))
        assert not made.timelines[0].transfers
        assert Report.from_json(made.to_json()) == made
        assert "<canvas" in report_to_html(made)


class TestFiles:
    @pytest.mark.parametrize("units", [1, 12])
    def test_json_round_trip(self, tmp_path: Path, units: int):
        made = model_report(units)
        made.save(tmp_path / "run.json")
        again = Report.load(tmp_path / "run.json")
        assert again == made and str(again) == str(made)

    def test_an_unknown_suffix_is_refused(self, tmp_path: Path):
        with pytest.raises(ReportError, match=r"ends in \.html, \.perfetto\.json or \.json, found '\.txt'"):
            model_report(1).save(tmp_path / "run.txt")

    def test_a_folder_that_is_not_there(self, tmp_path: Path):
        with pytest.raises(ReportError, match="cannot be written: No such file"):
            model_report(1).save(tmp_path / "nowhere" / "run.json")
        with pytest.raises(ReportError, match="cannot be read: No such file"):
            Report.load(tmp_path / "run.json")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "expected JSON, found: Expecting value"),
            ("{", "expected JSON"),
            ("[1, NaN]", "the number NaN"),
            ("[" * 100_000, "nested too deeply"),
            (b"\xff\xfe\x00", "expected JSON"),
            ("[]", "expected a report, an object"),
            ('{"traceEvents": []}', "expected a report, an object"),
            ('{"format": "flextensor_fx report"}', "expected version 1 of the format, found None"),
            ('{"format": "flextensor_fx report", "version": 2}', "expected version 1 of the format, found 2"),
            ('{"format": "flextensor_fx report", "version": true}', "found True"),
            ('{"format": "flextensor_fx report", "version": 1}', r"report: expected an object \(Report\), found None"),
            ('{"format": "flextensor_fx report", "version": 1, "report": {"store": "s"}}', "found no 'selection'"),
        ],
    )
    def test_foreign_files_give_a_clear_error(self, text: str | bytes, message: str):
        with pytest.raises(ReportError, match=message):
            Report.from_json(text, "report file 'run.json'")

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("plan", "pool"), "x", r"report\.plan\.pool: expected a whole number, found 'x'"),
            (("plan", "pool"), True, "expected a whole number, found True"),
            (("plan", "pool"), 1 << 70, "found a number beyond 64 bits"),
            (("plan", "predicted_ms"), None, "expected a number, found None"),
            (("plan", "predicted_ms"), 1e300, r"expected a number of at most 1e\+15"),
            (("store",), "\ud800", r"report\.store: expected a text"),
            (("units", 0, "path"), 3, r"report\.units\[0\]\.path: expected a text, found 3"),
            (("selection", "matches", 0, "role"), "both", "expected one of 'include', 'exclude', found 'both'"),
            (
                ("timelines", 0, "compute", 0, "end_ms"),
                -1,
                r"report\.timelines\[0\]: timeline 'plan': expected 0 <= start_ms",
            ),
            (("timelines", 1, "more"), 1, "found also 'more'"),
            (("stats", "stall_ms_by_key"), [], "expected an object, found"),
            (("stays", 0), ["a"], r"report\.stays\[0\]: expected a list of 2"),
        ],
    )
    def test_a_damaged_value_is_named(self, path: tuple[str | int, ...], value: Any, message: str):
        data = json.loads(model_report(2).to_json())
        put(data["report"], path, value)
        with pytest.raises(ReportError, match=message):
            Report.from_json(json.dumps(data), "run.json")


SAVED = model_report(2).to_json()
PLACES = paths(json.loads(SAVED))[1:]


def shows_or_refuses(text: str | bytes) -> None:
    """A report that is read can be shown in every form; one that cannot is refused by the one error that says why."""
    try:
        made = Report.from_json(text, "run.json")
    except ReportError as error:
        if str(error).startswith("run.json: "):
            return
        raise
    assert str(made) and Report.from_json(made.to_json()) == made
    assert report_to_html(made).encode() and json.loads(report_to_trace(made))


class TestFuzzed:
    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(PLACES), JSON_VALUES)
    def test_any_value_anywhere(self, place: tuple[str | int, ...], value: Any):
        data = json.loads(SAVED)
        put(data, place, value)
        shows_or_refuses(json.dumps(data))

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from(PLACES))
    def test_anything_left_out(self, place: tuple[str | int, ...]):
        data = json.loads(SAVED)
        shows_or_refuses(json.dumps(without(data, place)))

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(SAVED)), st.binary(max_size=8))
    def test_any_bytes_anywhere(self, at: int, extra: bytes):
        shows_or_refuses(SAVED.encode()[:at] + extra)

    @settings(max_examples=60, deadline=None)
    @given(JSON_VALUES)
    def test_any_json(self, value: Any):
        shows_or_refuses(json.dumps(value))


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class TestPage:
    def test_it_needs_nothing_else(self):
        text = report_to_html(model_report(12))
        assert not re.search(r"https?:|//\w+\.|url\(|@import|<link|<iframe|\bfetch\(|XMLHttp|import\(", text)
        assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in Page(text).tags)
        assert "default-src 'none'" in text

    def test_it_shows_every_unit_pattern_and_both_timelines(self):
        made = model_report(12)
        text = report_to_html(made)
        page = Page(text)
        words = "".join(page.texts)
        assert [a["id"] for tag, a in page.tags if tag == "canvas"] == ["timeline-0", "timeline-1"]
        assert len([a for tag, a in page.tags if tag == "tr" and "data-unit" in a]) == 12
        for expected in ("model.layers.11", "model.layers.*", "matched nothing; nearest: model.layers.0", "it is empty",
                         f"Predicted {made.timelines[0].total_ms:.1f} ms a call",
                         f"Measured {made.timelines[1].total_ms:.1f} ms a call", "estimated costs", "recorded while it ran",
                         format_bytes(made.plan.budget or 0), "lm_head.weight", "forward 0"):  # fmt: skip
            assert expected in words
        assert "prefers-color-scheme: dark" in text

    def test_names_cannot_become_markup(self):
        text = report_to_html(model_report(3, prefix=HOSTILE))
        page = Page(text)
        assert sum(tag == "script" for tag, _ in page.tags) == 2 and "<img" not in text
        assert "".join(page.texts).count(HOSTILE) >= 6
        data = next(t for t in page.texts if t.startswith('{"timelines"'))
        assert json.loads(data)["units"][0] == f"{HOSTILE}0"

    def test_without_a_measured_call_there_is_one_timeline_and_a_hint(self):
        page = Page(report_to_html(model_report(3, measured=False)))
        assert sum(tag == "canvas" for tag, _ in page.tags) == 1
        assert "record a call with record_call" in "".join(page.texts)


class TestTrace:
    def test_two_processes_with_their_tracks(self):
        events = json.loads(report_to_trace(model_report(12)))["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert names == {(p, t): n for p in (1, 2) for t, n in ((1, "compute"), (2, "stalls"), (3, "transfers"))}
        processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert [name.split(":")[0] for name in processes] == ["predicted", "measured"]
        counters = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == 1 and e["name"] == "memory (bytes)"]
        assert counters[0].keys() == {"resident", "streamed"}
        for track in names:
            spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]
            assert spans and all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
