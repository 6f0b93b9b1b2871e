import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flextensor_fx.errors import StoreError
from flextensor_fx.runtime import session_dir
from flextensor_fx.runtime.fileio import PositionalFile
from flextensor_fx.runtime.layout import RAW_DTYPES, WeightSpec, byte_view, check_storable, spec_of
from flextensor_fx.runtime.session_dir import SessionDir, choose_base
from flextensor_fx.runtime.store import Store

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    *RAW_DTYPES,
]


def random_weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def aligned_buffer(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + 4096, np.uint8)
    start = -raw.__array_interface__["data"][0] % 4096
    return raw[start : start + nbytes]


def stored_bytes(store: Store, key: str) -> bytes:
    buffer = np.full(store.spec(key).nbytes, 0xEE, np.uint8)
    store.read_into(key, buffer)
    slab = aligned_buffer(store.slab_bytes(key))
    shift, _ = store.read_slab(key, slab)
    assert shift % 16 == 0
    assert slab[shift : shift + len(buffer)].tobytes() == buffer.tobytes()
    return buffer.tobytes()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return byte_view(tensor).numpy().tobytes()


def filled(directory: Path, weights: dict[str, torch.Tensor], **options: bool) -> Store:
    store = Store.create(directory, [spec_of(key, value) for key, value in weights.items()], **options)
    for key, value in weights.items():
        store.write(key, value)
    return store


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct_io(request: pytest.FixtureRequest) -> bool:
    return request.param


class TestBytes:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_round_trips(self, tmp_path: Path, dtype: torch.dtype, direct_io: bool):
        weights = {
            "u:a": random_weight((7, 5), dtype),
            "u:b": random_weight((), dtype),
            "u:c": random_weight((9001,), dtype),
        }
        store = filled(tmp_path, weights, direct_io=direct_io)
        for drop in (False, True):
            for key, value in weights.items():
                assert stored_bytes(store, key) == raw_bytes(value)
            if not drop:
                store.drop_cache()

    def test_permuted_strides_keep_their_physical_order(self, tmp_path: Path):
        weights = {
            "channels_last": torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
            "transposed": torch.randn(6, 11).t(),
            "one": torch.randn(3, 1, 2).as_strided((3, 1, 2), (2, 999, 1)),
            "offset": torch.randn(10, 4)[3:7],
        }
        store = filled(tmp_path, weights)
        for key, value in weights.items():
            assert store.spec(key).stride == value.stride()
            assert stored_bytes(store, key) == raw_bytes(value)

    def test_another_stride_is_converted(self, tmp_path: Path):
        store = filled(tmp_path, {"a": torch.zeros(6, 4)})
        value = torch.randn(4, 6).t()
        store.write("a", value)
        assert stored_bytes(store, "a") == raw_bytes(value.contiguous())
        store.write("a", torch.ones(1).expand(6, 4))
        assert stored_bytes(store, "a") == raw_bytes(torch.ones(6, 4))

    def test_the_file_is_plain_safetensors(self, tmp_path: Path):
        weights = {
            "u:w": torch.randn(33, 5),
            "u:cl": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "u:c": torch.randn(6, dtype=torch.complex64),
        }
        store = filled(tmp_path, weights)
        path = store.files[0].path
        loaded = load_file(path)
        assert torch.equal(loaded["u:w"], weights["u:w"])
        assert torch.equal(loaded["u:cl"], weights["u:cl"].permute(0, 2, 3, 1))
        assert loaded["u:c"].numpy().tobytes() == raw_bytes(weights["u:c"])
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
        assert all((start + header[key]["data_offsets"][0]) % 4096 == 0 for key in weights)
        assert os.path.getsize(path) % 4096 == 0
        with safetensors.safe_open(path, "pt") as opened:
            facts = json.loads(opened.metadata()["flextensor_fx"])
        assert tuple(facts["u:cl"]["stride"]) == weights["u:cl"].stride()

    def test_our_own_file_can_be_attached(self, tmp_path: Path):
        weights = {dtype: random_weight((3, 4), dtype).t() for dtype in DTYPES}
        first = filled(tmp_path, {str(dtype): value for dtype, value in weights.items()})
        second = Store.create(tmp_path / "..")
        specs = second.attach(first.files[0].path, {f"v:{dtype}": str(dtype) for dtype in DTYPES})
        for spec, (dtype, value) in zip(specs, weights.items(), strict=True):
            assert (spec.dtype, spec.shape, spec.stride) == (dtype, value.shape, value.stride())
            assert stored_bytes(second, spec.key) == raw_bytes(value)


class TestStorable:
    def test_reasons(self):
        class Sub(torch.Tensor):
            pass

        resized = torch.randn(4)
        resized.untyped_storage().resize_(0)
        cases = {
            "layout": torch.eye(3).to_sparse(),
            "empty": torch.empty(0, 4),
            "overlaps": torch.ones(1).expand(3),
            "gaps": torch.randn(4, 8)[:, :5],
            "subclass": torch.randn(3).as_subclass(Sub),
            "quantized": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
            "meta": torch.empty(3, device="meta"),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
            "resized": resized,
        }
        for word, tensor in cases.items():
            assert word in (check_storable(tensor) or ""), word

    def test_what_can_be_stored(self):
        for value in (
            torch.tensor(1.0),
            nn.Parameter(torch.randn(3, 2).t()),
            torch.randn(4, 4)[2:],
            torch.ones(2).bool(),
        ):
            assert check_storable(value) is None


class TestWrites:
    def test_a_write_is_seen_by_the_next_read(self, tmp_path: Path, direct_io: bool):
        store = filled(tmp_path, {"a": torch.zeros(300_000)}, direct_io=direct_io)
        for n in range(6):
            value = torch.full((300_000,), float(n))
            if n % 2:
                store.drop_cache()
            store.write("a", value)
            assert stored_bytes(store, "a") == raw_bytes(value)

    def test_versions(self, tmp_path: Path):
        store = Store.create(tmp_path, [WeightSpec("a", (4,), (1,), torch.float32)])
        assert store.version("a") == 0
        with pytest.raises(StoreError, match="never been written"):
            store.read_into("a", np.empty(16, np.uint8))
        store.write("a", torch.ones(4))
        store.write("a", nn.Parameter(torch.ones(4)))
        assert store.version("a") == 2

    def test_wrong_values_are_refused(self, tmp_path: Path):
        store = filled(tmp_path, {"a": torch.zeros(4)})
        for value in (torch.zeros(5), torch.zeros(4).half()):
            with pytest.raises(StoreError, match=r"'?a.*float32\[4\].*convert"):
                store.write("a", value)
        with pytest.raises(StoreError, match="no such key"):
            store.write("b", torch.zeros(4))
        with pytest.raises(StoreError, match="already has"):
            store.add([WeightSpec("a", (4,), (1,), torch.float32)])
        with pytest.raises(StoreError, match="into 3 bytes"):
            store.read_into("a", np.empty(3, np.uint8))

    def test_a_full_disk_is_told_before_anything_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=4096))
        with pytest.raises(StoreError, match="needs 45056 bytes, 8192 are free"):
            Store.create(tmp_path, [WeightSpec("a", (10000,), (1,), torch.float32)])
        assert not list(tmp_path.iterdir())

    def test_a_disk_that_fills_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def full(*args: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        store = filled(tmp_path, {"a": torch.zeros(4)})
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StoreError, match="could not be had: No space left"):
                store.add([WeightSpec("b", (4,), (1,), torch.float32)])
        assert len(list(tmp_path.iterdir())) == 1
        before = store.version("a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StoreError, match=r"weight a: .*No space left.*store_dir"):
                store.write("a", torch.ones(4))
        assert store.version("a") > before
        with pytest.raises(StoreError, match="torn"):
            stored_bytes(store, "a")
        store.write("a", torch.ones(4))
        assert stored_bytes(store, "a") == raw_bytes(torch.ones(4))

    def test_partial_writes_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))
        value = torch.randn(1111)
        assert stored_bytes(filled(tmp_path, {"a": value}), "a") == raw_bytes(value)


class TestBadReads:
    def test_a_truncated_file_raises(self, tmp_path: Path, direct_io: bool):
        store = filled(tmp_path, {"a": torch.ones(5000), "b": torch.ones(5000)}, direct_io=direct_io)
        for drop in (True, False):
            os.truncate(store.files[0].path, 4096 + 20480 + 8192)
            if drop:
                store.drop_cache()
            stored_bytes(store, "a")
            for read in (
                lambda: store.read_into("b", np.empty(20000, np.uint8)),
                lambda: store.read_slab("b", aligned_buffer(20480)),
            ):
                with pytest.raises(StoreError, match=r"weight b: .*expected 20000 bytes.*found 8192.*truncated"):
                    read()

    def test_a_removed_file_goes_on_working(self, tmp_path: Path):
        value = torch.randn(5000)
        store = filled(tmp_path, {"a": value})
        os.unlink(store.files[0].path)
        assert stored_bytes(store, "a") == raw_bytes(value)

    def test_an_io_error_names_the_weight(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def broken(*args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        store = filled(tmp_path, {"a": torch.ones(5)})
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(StoreError, match=r"weight a: float32\[5\].*Input/output error.*check the disk"):
            stored_bytes(store, "a")

    def test_short_reads_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_io: bool):
        value = torch.randn(50_000)
        store = filled(tmp_path, {"a": value}, direct_io=direct_io)
        store.drop_cache()
        real = os.preadv
        for most in (8192, 10_000):

            def short(fd: int, buffers: list[memoryview], offset: int, flags: int = 0, most: int = most) -> int:
                return real(fd, [buffers[0][:most]], offset, flags)

            monkeypatch.setattr(os, "preadv", short)
            assert stored_bytes(store, "a") == raw_bytes(value)

    def test_where_direct_reads_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        value = torch.randn(50_000)
        filled(tmp_path, {"a": value})
        real_open, real_read = os.open, os.preadv

        def no_direct(path: str, flags: int, *rest: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real_open(path, flags, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_direct)
            (tmp_path / "x").mkdir()
            store = filled(tmp_path / "x", {"a": value})
            assert not store.files[0].direct
            assert stored_bytes(store, "a") == raw_bytes(value)
        (tmp_path / "y").mkdir()
        store = filled(tmp_path / "y", {"a": value})
        store.drop_cache()
        direct_fd = store.files[0]._direct_fd

        def refuse(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if fd == direct_fd:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real_read(fd, buffers, offset, flags)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            slab = aligned_buffer(store.slab_bytes("a"))
            store.read_slab("a", slab)
            assert slab[:200_000].tobytes() == raw_bytes(value)
            assert not store.files[0].direct

    def test_cached_pages_cost_no_disk_read(self, tmp_path: Path):
        store = filled(tmp_path, {"a": torch.randn(500_000)})
        file = store.files[0]
        slab = aligned_buffer(store.slab_bytes("a"))
        store.read_slab("a", slab)
        if not file.direct or not file._probe:
            pytest.skip("the file system refuses O_DIRECT, or the kernel has no cachestat")
        assert store.read_slab("a", slab)[1].cached == 2_000_000
        store.drop_cache()
        for _ in range(2):
            assert store.read_slab("a", slab)[1].disk == 2_000_000
        assert not file._is_cached(4096, 4096)


class TestAttach:
    @pytest.mark.parametrize("pad", [0, 8, 16, 24])
    def test_in_place_at_any_offset(self, tmp_path: Path, pad: int, direct_io: bool):
        a, b = torch.randn(3000), torch.randn(77, 10).half()
        path = self.file_with(tmp_path, {"a": a, "b": b}, pad)
        store = Store.create(tmp_path, direct_io=direct_io)
        assert [str(s.dtype) for s in store.attach(path, {"u:a": "a", "u:b": "b"})] == [
            "torch.float32",
            "torch.float16",
        ]
        for drop in (False, True):
            if drop:
                store.drop_cache()
            assert stored_bytes(store, "u:a") == raw_bytes(a)
            assert stored_bytes(store, "u:b") == raw_bytes(b)

    def test_writes_go_to_a_file_of_our_own(self, tmp_path: Path):
        path = self.file_with(tmp_path, {"a": torch.zeros(100)}, 0)
        before = path.read_bytes()
        store = Store.create(tmp_path)
        store.attach(path, {"a": "a"})
        for n in (1.0, 2.0):
            store.write("a", torch.full((100,), n))
            assert stored_bytes(store, "a") == raw_bytes(torch.full((100,), n))
        assert path.read_bytes() == before
        assert len(store.files) == 2

    def test_a_file_changed_underneath_raises(self, tmp_path: Path):
        path = self.file_with(tmp_path, {"a": torch.zeros(100)}, 0)
        store = Store.create(tmp_path)
        store.attach(path, {"a": "a"})
        time.sleep(0.02)
        with open(path, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"abcd")
        with pytest.raises(StoreError, match="written to since"):
            stored_bytes(store, "a")

    def test_errors(self, tmp_path: Path):
        store = Store.create(tmp_path)
        path = self.file_with(tmp_path, {"layer.weight": torch.zeros(100)}, 0)
        with pytest.raises(StoreError, match=r"no tensor 'layer\.wieght'; nearest names: layer\.weight"):
            store.attach(path, {"a": "layer.wieght"})
        with pytest.raises(StoreError, match="No such file"):
            store.attach(tmp_path / "none", {"a": "a"})
        os.truncate(path, os.path.getsize(path) - 1)
        with pytest.raises(StoreError, match="truncated"):
            store.attach(path, {"a": "layer.weight"})
        (tmp_path / "text").write_text("not a checkpoint at all")
        with pytest.raises(StoreError, match="expected a safetensors file"):
            store.attach(tmp_path / "text", {"a": "a"})

    def test_no_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def refuse(*args: object) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="Permission denied; check the path and its permissions"):
            Store(tmp_path).attach(tmp_path / "x", {"a": "a"})
        with pytest.raises(StoreError, match="Permission denied"):
            Store.create(tmp_path, [WeightSpec("a", (4,), (1,), torch.float32)])

    @staticmethod
    def file_with(directory: Path, weights: dict[str, torch.Tensor], pad: int) -> Path:
        path = directory / "model.safetensors"
        save_file(weights, path)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length] + b" " * pad
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        return path


class TestLife:
    def test_closed(self, tmp_path: Path):
        session = SessionDir(tmp_path)
        store = Store.create(session, [WeightSpec("a", (4,), (1,), torch.float32)])
        assert os.path.isdir(store.path)
        for _ in range(2):
            store.close()
        assert not list(tmp_path.iterdir())
        for use in (
            lambda: store.write("a", torch.ones(4)),
            lambda: store.read_into("a", np.empty(16, np.uint8)),
            lambda: store.spec("a"),
            lambda: store.add([]),
        ):
            with pytest.raises(StoreError, match="closed"):
                use()

    def test_a_dropped_store_leaves_nothing(self, tmp_path: Path):
        before = len(os.listdir("/proc/self/fd"))
        store = Store.create(SessionDir(tmp_path), [WeightSpec("a", (4,), (1,), torch.float32)])
        del store
        assert not list(tmp_path.iterdir())
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_failed_open_leaves_no_descriptor(self, tmp_path: Path):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="No such file"):
            PositionalFile(str(tmp_path / "none"))
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_child_reads_but_writes_for_itself_and_removes_nothing(self, tmp_path: Path):
        store = Store.create(SessionDir(tmp_path), [WeightSpec("a", (4,), (1,), torch.float32)])
        store.write("a", torch.ones(4))

        def child() -> None:
            assert stored_bytes(store, "a") == raw_bytes(torch.ones(4))
            store.write("a", torch.zeros(4))
            assert stored_bytes(store, "a") == raw_bytes(torch.zeros(4))
            store.close()

        assert in_child(child) == 0
        assert os.path.isdir(store.path)
        assert stored_bytes(store, "a") == raw_bytes(torch.ones(4))


class TestSessionDir:
    def test_an_orphan_of_a_killed_process_is_removed_and_a_living_one_is_not(self, tmp_path: Path):
        code = (
            "import sys, time\nfrom flextensor_fx.runtime.session_dir import SessionDir\n"
            "d = SessionDir(sys.argv[1])\n(d.path / 'big').write_bytes(b'x')\nprint(d.path, flush=True)\ntime.sleep(60)"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        root = Path(__file__).parents[1]
        one, two = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2))
        try:
            paths = [Path(p.stdout.readline().strip()) for p in (one, two) if p.stdout]
            SessionDir(tmp_path).close()
            assert all(path.is_dir() for path in paths)
            one.send_signal(signal.SIGKILL)
            one.wait()
            assert paths[0].is_dir()
            with_orphan = SessionDir(tmp_path)
            assert not paths[0].exists()
            assert paths[1].is_dir()
            with_orphan.close()
        finally:
            for process in (one, two):
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()

    def test_removed_at_exit(self, tmp_path: Path):
        code = "import sys\nfrom flextensor_fx.runtime.session_dir import SessionDir\nd = SessionDir(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[1])
        assert not list(tmp_path.iterdir())

    def test_a_child_does_not_remove_it(self, tmp_path: Path):
        session = SessionDir(tmp_path)
        assert in_child(session.close) == 0
        assert session.path.is_dir()

    def test_a_directory_in_the_making_survives_sweepers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        real = os.open
        swept = []

        def sweep_before_lock(path: object, flags: int, *rest: int) -> int:
            if flags & os.O_EXCL and not swept:
                swept.append(path)
                session_dir._sweep(tmp_path)
            return real(path, flags, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", sweep_before_lock)
        session = SessionDir(tmp_path)
        assert swept
        assert session.path.is_dir()
        assert not os.path.exists(os.path.dirname(str(swept[0])))
        monkeypatch.undo()
        real_lock = session_dir._try_lock

        def sweep_before_flock(fd: int) -> None:
            monkeypatch.undo()
            session_dir._sweep(tmp_path)
            real_lock(fd)

        monkeypatch.setattr(session_dir, "_try_lock", sweep_before_flock)
        second = SessionDir(tmp_path)
        assert second.path.is_dir()
        assert (second.path / "lock").exists()
        assert session.path.is_dir()

    def test_links_and_strangers_are_left_alone(self, tmp_path: Path):
        (tmp_path / "dear").mkdir()
        (tmp_path / "dear" / "lock").touch()
        (tmp_path / "flextensor_fx-link").symlink_to(tmp_path / "dear")
        (tmp_path / "flextensor_fx-file").touch()
        SessionDir(tmp_path).close()
        assert (tmp_path / "dear" / "lock").exists()
        assert (tmp_path / "flextensor_fx-file").exists()

    def test_memory_file_systems_are_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        a, b = tmp_path / "a b", tmp_path / "home"
        a.mkdir()
        (b / ".cache").mkdir(parents=True)
        mounts = tmp_path / "mounts"
        mounts.write_text(
            "1 0 0:1 / / rw - ext4 /dev/x rw\n"
            f"2 1 0:2 / {str(a).replace(' ', chr(92) + '040')} rw shared:1 - tmpfs t rw\n"
            "3 1 0:3 / /var/tmp rw - ramfs r rw\n"
        )
        monkeypatch.setattr(session_dir, "_MOUNTS", str(mounts))
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(a))
        monkeypatch.setattr(Path, "home", lambda: b)
        assert choose_base(None) == b / ".cache"
        assert choose_base(a) == a
        mounts.write_text("1 0 0:1 / / rw - tmpfs t rw\n")
        with pytest.raises(StoreError, match="in memory only; set store_dir"):
            choose_base(None)
        monkeypatch.setattr(session_dir, "_MOUNTS", str(tmp_path / "none"))
        assert choose_base(None) == a

    def test_a_directory_that_cannot_be_used(self, tmp_path: Path):
        with pytest.raises(StoreError, match=r"store_dir='.*none'.*no such directory"):
            SessionDir(tmp_path / "none")


def in_child(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
