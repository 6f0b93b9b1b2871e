"""Loading that fails, is interrupted or is lied to: an error that names the file, and a model as it was before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import flextensor_fx
from compiling import assert_equal, fresh_compiler, session_of, streamed_names
from flextensor_fx.errors import BudgetError, ConfigError, LoadError, OffloadError, SelectionError, StoreError
from flextensor_fx.runtime import registry
from flextensor_fx.runtime.fileio import PositionalFile
from flextensor_fx.runtime.host_store import HostStore
from flextensor_fx.runtime.store import Store

__all__ = ["fresh_compiler"]


class Net(nn.Sequential):
    """Four layers of 16 KB, and a buffer."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64) for _ in range(4)), nn.BatchNorm1d(64))
        self.eval()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def checkpoint(net: Net, tmp_path: Path) -> Path:
    """A directory with two files and their index."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state, table = net.state_dict(), {}
    for number in (0, 1):
        part = {name: value for name, value in state.items() if (int(name[0]) > 1) == bool(number)}
        safetensors.torch.save_file(part, folder / f"model-{number}.safetensors")
        table |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return folder


def config(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "store").mkdir(exist_ok=True)
    return {
        "include_patterns": ["**"],
        "min_stream_bytes": 0,
        "budget": "60%",
        "store_dir": tmp_path / "store",
        **changes,
    }


def snapshot(model: nn.Module) -> list[tuple[int, str, int, torch.dtype]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(id(t), name, 0 if t.is_meta else t.data_ptr(), t.dtype) for name, t in tensors]


def models(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    with torch.device("meta"):
        empty = Net().to(dtype)
    return [empty, Net().to(dtype)]


# --- interrupted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["interrupt", "full"]
)
@pytest.mark.parametrize("store", ["disk", "host"])
def test_a_load_that_fails_at_any_weight_leaves_nothing(
    net: Net, checkpoint: Path, store: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are converted, so that all are written; the model has values or none."""
    place = Store if store == "disk" else HostStore
    real = place.write_pieces
    for model in models(torch.float64):
        expected = {name: value.to(model.state_dict()[name].dtype) for name, value in net.state_dict().items()}
        before, values = snapshot(model), {n: v.clone() for n, v in model.state_dict().items()}
        failures = 0
        for number in range(20):
            left = number

            def failing(self: Any, key: str, pieces: Any) -> None:
                def some() -> Any:
                    nonlocal left
                    for piece in pieces:
                        left -= 1
                        if left < 0:
                            raise error
                        yield piece

                real(self, key, some())

            with monkeypatch.context() as patch:
                patch.setattr(place, "write_pieces", failing)
                try:
                    flextensor_fx.load(model, checkpoint, config(tmp_path, store=store))
                    break
                except (KeyboardInterrupt, StoreError, OSError):
                    failures += 1
            assert snapshot(model) == before
            assert not registry.living_sessions()
            assert not list((tmp_path / "store").iterdir())
            if not model[0].weight.is_meta:
                assert_equal(dict(model.state_dict()), values)
        assert failures >= 3
        assert streamed_names(model)
        assert_equal(dict(model.state_dict()), expected)
        flextensor_fx.release(model)


@pytest.mark.parametrize("moment", range(12))
def test_an_interrupt_while_the_model_is_changed_is_undone(
    net: Net, checkpoint: Path, moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flextensor_fx import loading, session

    real_put, real_stand_in = loading._put, session.Session._put_stand_in
    for model in models():
        before, values = snapshot(model), {n: v.clone() for n, v in model.state_dict().items()}
        left = moment

        def put(*args: Any, real: Any = real_put) -> Any:
            nonlocal left
            left -= 1
            done = real(*args)
            if left < 0:
                raise KeyboardInterrupt
            return done

        with monkeypatch.context() as patch:
            patch.setattr(loading, "_put", put)
            patch.setattr(session.Session, "_put_stand_in", lambda *args: put(*args, real=real_stand_in))
            with pytest.raises(KeyboardInterrupt):
                flextensor_fx.load(model, checkpoint, config(tmp_path))
        assert snapshot(model) == before
        assert not registry.living_sessions()
        assert not list((tmp_path / "store").iterdir())
        if not model[0].weight.is_meta:
            assert_equal(dict(model.state_dict()), values)
        flextensor_fx.load(model, checkpoint, config(tmp_path))
        assert_equal(dict(model.state_dict()), dict(net.state_dict()))
        flextensor_fx.release(model)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"budget": 100}, BudgetError),
        ({"include_patterns": ["none.*"]}, SelectionError),
        ({"include_patterns": ["a..b"]}, ConfigError),
        ({"nonsense": 1}, ConfigError),
        ({"store_dir": "/proc/none"}, StoreError),
        ({"profile": "/proc/none.json"}, OffloadError),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(
    checkpoint: Path, changes: dict[str, Any], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PositionalFile, "read", lambda *args: pytest.fail("something was read"))
    for model in models():
        before = snapshot(model)
        with pytest.raises(error):
            flextensor_fx.load(model, checkpoint, config(tmp_path, **changes))
        assert snapshot(model) == before
        assert not registry.living_sessions()


def test_no_descriptor_and_no_thread_is_left(checkpoint: Path, tmp_path: Path) -> None:
    import threading

    def once(strict: bool = True) -> None:
        model = models(torch.float64)[0]
        flextensor_fx.load(model, checkpoint, config(tmp_path), strict=strict)
        flextensor_fx.release(model)

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    once()
    with pytest.raises(LoadError):
        flextensor_fx.load(models()[0], [checkpoint / "model-0.safetensors"], config(tmp_path))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


# --- files that change -------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model-1.safetensors"
    whole = file.read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        model = models()[0]
        with pytest.raises((StoreError, LoadError), match=r"model-1\.safetensors"):
            flextensor_fx.load(model, checkpoint, config(tmp_path))
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    checkpoint: Path, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PositionalFile.read

    def shrinking(self: PositionalFile, buffer: Any, offset: int, needed: int) -> Any:
        os.truncate(checkpoint / "model-1.safetensors", 2000)
        return real(self, buffer, offset, needed)

    monkeypatch.setattr(PositionalFile, "read", shrinking)
    for model in models(dtype):
        before = snapshot(model)
        whole = (checkpoint / "model-1.safetensors").read_bytes()
        with pytest.raises((StoreError, LoadError), match=r"model-1\.safetensors.*(truncated|changed)"):
            flextensor_fx.load(model, checkpoint, config(tmp_path))
        assert snapshot(model) == before
        (checkpoint / "model-1.safetensors").write_bytes(whole.ljust(50_000, b"\0"))
        break


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PositionalFile.read
    file = checkpoint / "model-0.safetensors"

    def replacing(self: PositionalFile, *args: Any) -> Any:
        shutil.copy(file, checkpoint / "new")
        os.replace(checkpoint / "new", file)
        return real(self, *args)

    monkeypatch.setattr(PositionalFile, "read", replacing)
    model = models()[0]
    with pytest.raises(LoadError, match=r"model-0\.safetensors: was changed while it was loaded"):
        flextensor_fx.load(model, checkpoint, config(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_file_that_changes_afterwards_is_an_error_for_what_is_served_from_it_and_nothing_for_the_rest(
    net: Net, checkpoint: Path, tmp_path: Path
) -> None:
    model, x = models()[0], torch.randn(3, 64)
    flextensor_fx.load(model, checkpoint, config(tmp_path, inner_backend="eager"))
    compiled = torch.compile(model, backend=flextensor_fx.flextensor)
    with torch.no_grad():
        assert_equal(compiled(x), net(x))
        for file in checkpoint.glob("*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
            os.utime(file, (1, 1))  # the clock of a file system may be coarse
        streamed = streamed_names(model)
        with pytest.raises(StoreError, match=r"expected .* as it was when it was attached, found it written to"):
            compiled(x)
        for name, parameter in model.named_parameters():
            if name in streamed:
                with pytest.raises(StoreError, match="as it was when it was attached"):
                    parameter.sum()
            else:
                assert_equal(parameter.detach(), net.get_parameter(name).detach())
        assert 0 < len(streamed) < 10


# --- files that do not fit together ------------------------------------------------------------------------------------


def _edit_index(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps(edit(data) or data))

    return change


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _without_index(then: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        then(folder)

    return change


_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an absent file": (
        lambda folder: (folder / "model-1.safetensors").unlink(),
        r"1 files that are not there: model-1",
    ),
    "a tensor elsewhere": (
        _edit_index(lambda data: data["weight_map"].update({"0.weight": "model-1.safetensors"})),
        r"model-1.*the index expects 1 tensors that it lacks: 0\.weight",
    ),
    "a way out": (
        _edit_index(lambda data: data["weight_map"].update({"0.weight": "../model-0.safetensors"})),
        r"'0\.weight': expected the name of a file beside the index, found '\.\./model-0",
    ),
    "an absolute path": (
        _edit_index(lambda data: data["weight_map"].update({"0.weight": "/etc/passwd"})),
        "found '/etc/passwd', which leads elsewhere",
    ),
    "no table": (_edit_index(lambda data: {"weights": 1}), 'expected an object with "weight_map"'),
    "an empty table": (_edit_index(lambda data: {"weight_map": {}}), "expected tensors, found none"),
    "numbers for files": (_edit_index(lambda data: {"weight_map": {"a": 1}}), 'expected an object with "weight_map"'),
    "no JSON": (_write("model.safetensors.index.json", b"{"), "expected JSON"),
    "deep JSON": (_write("model.safetensors.index.json", b"[" * 100_000), "expected JSON"),
    "two indexes": (
        lambda folder: (
            (folder / "model.safetensors.index.json").rename(folder / "b.safetensors.index.json")
            and shutil.copy(folder / "b.safetensors.index.json", folder / "a.safetensors.index.json")
            and None
        ),
        r"expected one index, found a\.safetensors\.index\.json, b\.",
    ),
    "one tensor twice": (
        _without_index(lambda folder: shutil.copy(folder / "model-0.safetensors", folder / "z.safetensors")),
        r"tensor '0\.\w+': found in .*model-0\.safetensors and in .*z\.safetensors",
    ),
    "no weights": (
        _without_index(lambda folder: [file.rename(file.with_suffix(".bin")) for file in folder.glob("*.safetensors")]),
        r"expected files in \.safetensors, found model-0\.bin",
    ),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_files_that_do_not_fit_together(fault: str, checkpoint: Path, tmp_path: Path) -> None:
    change, message = _FAULTS[fault]
    change(checkpoint)
    model = models()[0]
    with pytest.raises(LoadError, match=message):
        flextensor_fx.load(model, checkpoint, config(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_other_weights_that_cannot_be_used(checkpoint: Path, tmp_path: Path) -> None:
    def error(weights: Any) -> str:
        with pytest.raises((LoadError, StoreError)) as caught:
            flextensor_fx.load(models()[0], weights, config(tmp_path))
        return str(caught.value)

    assert "expected a file, a list of files, a directory or a mapping, found int" in error(3)
    assert "found an empty list" in error([])
    assert "No such file" in error(tmp_path / "none.safetensors")
    assert "given twice" in error([checkpoint / "model-0.safetensors"] * 2)
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    assert "found what torch.save writes" in error(tmp_path / "a.bin")
    assert "expected a tensor, found int" in error(dict.fromkeys(Net().state_dict(), 3))
    assert "on the meta device, which has none" in error(models()[0].state_dict())


def test_hostile_headers_raise(net: Net, tmp_path: Path) -> None:
    state = net.state_dict()
    file = tmp_path / "a.safetensors"
    safetensors.torch.save_file(state, file)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entry = header["0.weight"]
    for changed in (
        3,
        {},
        {**entry, "dtype": "X9"},
        {**entry, "dtype": ["F32"]},
        {**entry, "shape": [64, -64]},
        {**entry, "shape": [64.0, 64]},
        {**entry, "shape": "ab"},
        {**entry, "data_offsets": [0, 1 << 70]},
        {**entry, "data_offsets": [-5, 16379]},
        {**entry, "data_offsets": [0, 16384.0]},
    ):
        text = json.dumps({**header, "0.weight": changed}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        with pytest.raises((StoreError, LoadError), match=r"a\.safetensors|size mismatch"):
            flextensor_fx.load(models()[0], file, config(tmp_path))
    facts = {"0.weight": {"shape": [64, 64], "stride": [64, 1], "dtype": "load"}}
    folded = {"0.weight": {**facts["0.weight"], "dtype": "float32", "stride": [0, 0]}}
    for text in (json.dumps(facts), "[1]", "3", "{", json.dumps(folded)):
        data = json.dumps({"__metadata__": {"flextensor_fx": text}, **header}).encode()
        file.write_bytes(len(data).to_bytes(8, "little") + data + raw[8 + length :])
        with pytest.raises((StoreError, LoadError), match=r"a\.safetensors"):
            flextensor_fx.load(models()[0], file, config(tmp_path))


def test_a_release_after_a_load_keeps_the_files(net: Net, checkpoint: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    model = models()[0]
    flextensor_fx.load(model, checkpoint, config(tmp_path))
    assert session_of(model).engine.store.files
    flextensor_fx.release(model)
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before
    assert not list((tmp_path / "store").iterdir())
    assert_equal(dict(model.state_dict()), dict(net.state_dict()))
