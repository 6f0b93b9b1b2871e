"""Measuring the transfer curve: which reads are made, when they end, what they say, and what is kept of them."""

from __future__ import annotations

import json
import os
import platform
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flextensor_fx.link_curve as link_curve
from flextensor_fx.errors import StoreError
from flextensor_fx.link_curve import LARGEST, curve_sizes, link_of, measure_curve
from flextensor_fx.runtime.arena import Arena
from flextensor_fx.runtime.fileio import PositionalFile
from flextensor_fx.runtime.session_dir import mount_of

KIB = 1 << 10
MIB = 1 << 20


class SlowDisk(PositionalFile):
    """A file whose reads are said to take `latency` seconds and `rate` bytes per second, give or take a share `noise`.

    Every seventh is disturbed: five times that.
    """

    def __init__(self, path: Path, latency: float = 1e-4, rate: float = 2e9, noise: float = 0.0) -> None:
        super().__init__(os.fspath(path))
        self.latency, self.rate, self.noise = latency, rate, noise
        self.reads: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def time_read(self, buffer: memoryview, offset: int) -> float:
        super().time_read(buffer, offset)
        self.reads.append((offset, len(buffer)))
        self.threads.add(threading.current_thread().name)
        seconds = self.latency + len(buffer) / self.rate
        return seconds * (5 if len(self.reads) % 7 == 0 else 1 + self.noise * (len(self.reads) % 3 - 1))


@pytest.fixture
def disk(tmp_path: Path) -> SlowDisk:
    (tmp_path / "weights").write_bytes(os.urandom(4 * MIB + 100))
    return SlowDisk(tmp_path / "weights")


class TestSizes:
    @given(st.integers(0, 1 << 40), st.integers(1, 20))
    def test_they_are_pages_from_the_least_to_the_largest(self, largest: int, count: int):
        sizes = curve_sizes(largest, count)
        assert 1 <= len(sizes) <= count and list(sizes) == sorted(set(sizes))
        assert all(size % 4096 == 0 for size in sizes) and sizes[0] == 4096
        if count > 1:
            assert sizes[-1] >= min(largest, LARGEST) and sizes[-1] < min(max(largest, 1), LARGEST) + 4096

    def test_they_grow_in_equal_ratios(self):
        assert curve_sizes(64 * MIB) == tuple(4096 << 2 * k for k in range(8))


class TestMeasuring:
    def test_the_line_is_found_behind_disturbed_reads(self, disk: SlowDisk):
        made = measure_curve([disk])
        assert made.latency_ms == pytest.approx(0.1) and made.bytes_per_ms == pytest.approx(2e6)
        assert [p.nbytes for p in made.points] == list(curve_sizes(4 * MIB))
        assert made.provenance.startswith(f"measured on {platform.node()}, 2") and made.provenance.endswith("at rest")

    def test_reads_are_aligned_within_the_file_and_all_over_it(self, disk: SlowDisk):
        measure_curve([disk], [4096, 100_000])
        assert {length for _, length in disk.reads} == {4096, 102_400}
        assert all(offset % 4096 == 0 and offset + length <= 4 * MIB for offset, length in disk.reads)
        small = [offset for offset, length in disk.reads if length == 4096]
        assert len(set(small)) == len(small) and min(small) < MIB and max(small) > 3 * MIB

    def test_steady_times_end_early_and_spread_asks_for_more(self, disk: SlowDisk, tmp_path: Path):
        measure_curve([disk], [4096, 65536])
        assert len(disk.reads) == 2 * (1 + 5)
        shaky = SlowDisk(tmp_path / "weights", noise=0.1)
        made = measure_curve([shaky], [4096, 65536], samples=30, seconds=60)
        assert 2 * 15 < len(shaky.reads) <= 2 * 31
        assert all(point.spread > 0.02 for point in made.points)

    def test_no_time_leaves_two_sizes_with_few_reads(self, disk: SlowDisk):
        made = measure_curve([disk], seconds=0.0)
        assert [point.nbytes for point in made.points] == list(curve_sizes(4 * MIB)[:2])
        assert len(disk.reads) == 2 * (1 + 5)

    def test_a_slow_disk_leaves_out_the_large_sizes(self, tmp_path: Path, disk: SlowDisk):
        slow = SlowDisk(tmp_path / "weights", latency=1e-3, rate=1e6)  # 4 MiB would take 4 s
        made = measure_curve([slow], seconds=1.0)
        assert 2 <= len(made.points) < 8 and made.points[-1].nbytes <= 256 * KIB
        assert made.bytes_per_ms == pytest.approx(1e3, rel=0.01)

    def test_the_memory_is_the_engines(self, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch):
        limits = []

        def noting(limit: int) -> Arena:
            limits.append(limit)
            return Arena(limit)

        monkeypatch.setattr(link_curve, "Arena", noting)
        assert measure_curve([disk]).provenance.endswith("at rest") and limits[0] >= 32 * MIB
        assert measure_curve([disk], pool=MIB).provenance.endswith("at rest, into small pages") and limits[1] == MIB

    def test_the_largest_file_is_read(self, disk: SlowDisk, tmp_path: Path):
        (tmp_path / "small").write_bytes(bytes(8192))
        small = SlowDisk(tmp_path / "small")
        measure_curve([small, disk], [4096])
        assert disk.reads and not small.reads
        assert [point.nbytes for point in measure_curve([small]).points] == [4096, 8192]

    def test_files_that_cannot_be_measured(self, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(StoreError, match="at least 4096 bytes to read, found none"):
            measure_curve([])
        (tmp_path / "short").write_bytes(b"abc")
        with pytest.raises(StoreError, match=r"short of 3 bytes; write it first"):
            measure_curve([SlowDisk(tmp_path / "short")])

        def fails(self: PositionalFile, buffer: memoryview, offset: int) -> float:
            raise OSError(5, "Input/output error")

        broken = PositionalFile(os.fspath(tmp_path / "weights"))
        monkeypatch.setattr(PositionalFile, "time_read", fails)
        with pytest.raises(StoreError, match=r"weights cannot be read: .*Input/output error; check the disk"):
            measure_curve([broken])
        with pytest.raises(StoreError, match="cannot be read"):
            measure_curve([broken], beside=lambda: None)


class TestBeside:
    def test_compute_runs_here_while_another_thread_reads(self, disk: SlowDisk):
        names = []
        made = measure_curve([disk], beside=lambda: names.append(threading.current_thread().name))
        assert made.provenance.endswith("while computing") and made.bytes_per_ms == pytest.approx(2e6)
        assert set(names) == {threading.current_thread().name} and not disk.threads & set(names)

    def test_compute_that_fails_ends_the_reads(self, tmp_path: Path, disk: SlowDisk):
        shaky = SlowDisk(tmp_path / "weights", noise=0.5)

        def fails() -> None:
            raise OSError("no compute today")

        with pytest.raises(OSError, match="no compute today"):
            measure_curve([shaky], samples=10**9, seconds=3600, beside=fails)
        assert not any(thread.name.startswith("flextensor_fx-link") for thread in threading.enumerate())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of every curve that is measured from here on."""
    seen: list[tuple[int, ...]] = []
    measure = link_curve.measure_curve

    def noting(files, sizes, **options):
        seen.append(sizes)
        return measure(files, sizes, seconds=0.0, **options)

    monkeypatch.setattr(link_curve, "measure_curve", noting)
    return seen


class TestKept:
    def test_it_is_measured_once_and_the_directory_left_as_it_was(self, tmp_path: Path, measured: list):
        (tmp_path / "store").mkdir()
        first = link_of(tmp_path / "store", largest=MIB, cache_dir=tmp_path / "cache" / "deep")
        again = link_of(tmp_path / "store", largest=MIB, cache_dir=tmp_path / "cache" / "deep")
        assert first == again and measured == [curve_sizes(MIB)]
        assert not list((tmp_path / "store").iterdir()) and len(list((tmp_path / "cache" / "deep").iterdir())) == 1
        assert first.points and first.provenance.startswith("measured on")

    def test_larger_weights_and_compute_are_measured_anew(self, tmp_path: Path, measured: list):
        def curve(largest: int, **options):
            link_of(tmp_path, largest=largest, cache_dir=tmp_path / "cache", **options)
            return len(measured)

        assert [curve(64 * KIB), curve(128 * KIB), curve(256 * KIB), curve(64 * KIB)] == [1, 1, 2, 2]
        assert [curve(MIB, beside=lambda: None), curve(MIB, beside=lambda: None), curve(256 * KIB)] == [3, 3, 3]
        assert curve(64 * KIB, again=True) == 4
        assert [curve(64 * KIB, pool=MIB), curve(64 * KIB, pool=2 * MIB), curve(64 * KIB, pool=64 * MIB)] == [5, 5, 5]

    @pytest.mark.parametrize("damage", ["", "[]", "{", "other", "cut", "far"])
    def test_a_damaged_one_is_measured_and_written_over(self, tmp_path: Path, measured: list, damage: str):
        options = {"largest": 64 * KIB, "cache_dir": tmp_path / "cache"}
        link_of(tmp_path, **options)
        (file,) = (tmp_path / "cache").iterdir()
        text = file.read_text()
        data = json.loads(text)
        if damage == "other":  # the same device number, but something else is mounted there now
            data["link"]["key"]["mount"] = "tmpfs"
        elif damage == "far":
            data["link"]["link"]["bytes_per_ms"] = -1
        file.write_text({"cut": text[:-30], "other": json.dumps(data), "far": json.dumps(data)}.get(damage, damage))
        link_of(tmp_path, **options)
        assert len(measured) == 2
        link_of(tmp_path, **options)
        assert len(measured) == 2 and len(list((tmp_path / "cache").iterdir())) == 1

    def test_another_machine_or_disk_has_its_own(self, tmp_path: Path, measured: list, monkeypatch: pytest.MonkeyPatch):
        def link():
            return link_of(tmp_path, largest=64 * KIB, cache_dir=tmp_path / "cache")

        here = link()
        monkeypatch.setattr(platform, "node", lambda: "../other host")
        link()
        mount = mount_of(tmp_path)
        assert mount is not None
        monkeypatch.setattr(link_curve, "mount_of", lambda path: replace(mount, source="/dev/other"))
        link()
        assert len(measured) == 3 and len(list((tmp_path / "cache").iterdir())) == 2
        monkeypatch.undo()
        assert link() == here

    def test_where_nothing_can_be_kept_it_is_measured_each_time(self, tmp_path: Path, measured: list):
        (tmp_path / "file").write_text("no folder")
        for _ in range(2):
            link_of(tmp_path, largest=64 * KIB, cache_dir=tmp_path / "file")
        assert len(measured) == 2

    def test_the_cache_is_where_the_environment_says(
        self, tmp_path: Path, measured: list, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        link_of(tmp_path, largest=64 * KIB)
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        link_of(tmp_path, largest=64 * KIB)
        kept = sorted(path.relative_to(tmp_path).parts[:-1] for path in tmp_path.rglob("link-*.json"))
        assert kept == [("home", ".cache", "flextensor_fx"), ("xdg", "flextensor_fx")] and len(measured) == 2

    def test_directories_that_cannot_be_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(StoreError, match="no such directory"):
            link_of(tmp_path / "lost", cache_dir=tmp_path / "cache")

        def full(self: PositionalFile, nbytes: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(PositionalFile, "reserve", full)
        with pytest.raises(StoreError, match=r"no file of 131072 bytes can be written .*No space left"):
            link_of(tmp_path, largest=64 * KIB, cache_dir=tmp_path / "cache")
        assert not list(tmp_path.iterdir())


def test_a_real_disk_beside_real_compute(tmp_path: Path):
    made = link_of(tmp_path, largest=MIB, beside=lambda: sum(range(1000)), cache_dir=tmp_path / "cache")
    assert len(made.points) >= 2 and made.bytes_per_ms > 0 and made.latency_ms >= 0
