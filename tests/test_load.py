"""Loading from files, directories and mappings: what goes where, and what does not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import flextensor_fx
from compiling import assert_equal, fresh_compiler, resident, session_of, streamed_names
from flextensor_fx.errors import LoadError, OffloadError, StoreError
from flextensor_fx.runtime.layout import RAW_DTYPES
from flextensor_fx.runtime.parameter import OffloadedParameter

__all__ = ["fresh_compiler"]

CONFIG: dict[str, Any] = {"include_patterns": ["**"], "min_stream_bytes": 0}


class Net(nn.Module):
    """A tie, a buffer that is saved, a bias that is not streamed, and a frozen weight."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.norm = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].weight.requires_grad_(False)
        self.layers[1].weight.mark = "kept"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def trained(width: int = 64) -> Net:
    torch.manual_seed(1)
    net = Net(width)
    net(torch.randint(0, 40, (30,)))  # the running mean is no longer the one it begins with
    return net.eval()


def on_meta(width: int = 64) -> Net:
    with torch.device("meta"):
        return Net(width).eval()


def save(model: nn.Module, path: Path, names: Callable[[str], bool] = lambda name: True) -> Path:
    state = {name: value for name, value in model.state_dict().items() if names(name) and name != "head.weight"}
    safetensors.torch.save_file(state, path)
    return path


def one_file(net: nn.Module, path: Path) -> Any:
    return str(save(net, path / "model.safetensors"))


def a_list(net: nn.Module, path: Path) -> Any:
    first = save(net, path / "a.safetensors", lambda name: name.startswith("layers"))
    return [first, save(net, path / "b.safetensors", lambda name: not name.startswith("layers"))]


def a_directory(net: nn.Module, path: Path) -> Any:
    a_list(net, path)
    return path


def with_an_index(net: nn.Module, path: Path) -> Any:
    table = {}
    for file in a_list(net, path):
        with safetensors.safe_open(file, "pt") as opened:
            table |= dict.fromkeys(opened.keys(), file.name)
    safetensors.torch.save_file({"stray": torch.ones(3)}, path / "stray.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return path


def a_mapping(net: nn.Module, path: Path) -> Any:
    return {name: value for name, value in net.state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize("store", ["disk", "host"])
@pytest.mark.parametrize("form", [one_file, a_list, a_directory, with_an_index, a_mapping])
def test_every_form_of_weights(form: Callable[[nn.Module, Path], Any], store: str, tmp_path: Path) -> None:
    net, tokens = trained(144), torch.randint(0, 40, (5,))  # wide enough not to travel in packs
    model = on_meta(144)
    loaded = flextensor_fx.load(model, form(net, tmp_path), {**CONFIG, "budget": "60%", "store": store})
    assert loaded is model
    assert streamed_names(model)
    assert_equal(dict(model.state_dict()), dict(net.state_dict()))
    assert model.head.weight is model.embed.weight
    assert model.layers[1].weight.mark == "kept"
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in net.parameters()]
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with torch.no_grad():
        assert_equal(model(tokens), net(tokens))
        compiled = torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True)
        assert_equal([compiled(tokens), compiled(tokens)], [resident(net, inner="inductor")(tokens)] * 2)
    flextensor_fx.release(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_equal(dict(model.state_dict()), dict(net.state_dict()))


def test_weights_of_the_models_dtype_are_served_from_their_file(tmp_path: Path) -> None:
    path = one_file(trained(), tmp_path)
    model = on_meta()
    flextensor_fx.load(model, path, CONFIG)
    assert [file.path for file in session_of(model).engine.store.files] == [path]
    assert len(streamed_names(model)) == 9
    for inner in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=flextensor_fx.flextensor, options={"inner_backend": inner})
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                compiled(torch.randint(0, 40, (5,)))
    assert [file.path for file in session_of(model).engine.store.files] == [path]
    with torch.no_grad():
        model.layers[2].weight.zero_()  # lands in a file of our own
    assert not model.layers[2].weight.any()
    assert safetensors.torch.load_file(path)["layers.2.weight"].any()


@pytest.mark.parametrize("shift", range(0, 64, 8))
def test_any_offset_in_a_file_is_served_in_place_within_the_pool(shift: int, tmp_path: Path) -> None:
    net, tokens = trained(), torch.randint(0, 40, (5,))
    path = one_file(net, tmp_path)
    raw = Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].ljust(length + shift)
    Path(path).write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    model = on_meta()
    flextensor_fx.load(model, path, {**CONFIG, "inner_backend": "eager"})
    with torch.no_grad():
        compiled = torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True)
        for _ in range(3):
            session_of(model).engine.store.drop_cache()
            assert_equal(compiled(tokens), net(tokens))
    assert session_of(model).engine.stats().overruns == 0


@pytest.mark.parametrize("store", ["disk", "host"])
@pytest.mark.parametrize(
    ("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")]
)
def test_dtypes_are_converted_as_copy_does(stored: str, wanted: str, store: str, tmp_path: Path) -> None:
    net = trained().to(getattr(torch, stored))
    model = on_meta().to(getattr(torch, wanted))
    flextensor_fx.load(model, one_file(net, tmp_path), {**CONFIG, "budget": "50%", "store": store})
    assert streamed_names(model)
    expected = Net().to(getattr(torch, wanted))
    expected.load_state_dict(net.state_dict())
    assert_equal(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("megabytes", [0, 20])
@pytest.mark.parametrize("shift", [0, 8])
def test_conversions_of_several_pieces(megabytes: int, shift: int, tmp_path: Path) -> None:
    value = torch.randn(megabytes * 262_144 + 77)
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.randint(0, 9, (shift,), dtype=torch.uint8), "weight": value}, path)
    for dtype, config in ((torch.float64, CONFIG), (torch.bfloat16, {**CONFIG, "budget": "100%"})):
        empty = {"weight": torch.empty(value.shape, dtype=dtype, device="meta")}
        with pytest.warns(UserWarning, match='Unexpected key.*"a"'):
            weights = flextensor_fx.load(empty, path, config, strict=False)
        assert_equal(weights.fetch("weight"), value.to(dtype))


def test_every_dtype(tmp_path: Path) -> None:
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    dtypes = [*(getattr(torch, name) for name in names.split()), torch.float8_e5m2, torch.float8_e4m3fn, *RAW_DTYPES]
    state = {}
    for dtype in dict.fromkeys(dtypes):
        raw = torch.randint(0, 2 if dtype == torch.bool else 60, (6, 4, dtype.itemsize), dtype=torch.uint8)
        state[str(dtype).removeprefix("torch.")] = raw.view(dtype).reshape(6, 4)
    state |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "one": torch.randn(1)}
    del state["complex128"]  # which safetensors does not have
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    for include in (["**"], ["float32"]):
        model = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
        weights = flextensor_fx.load(model, tmp_path, {**CONFIG, "include_patterns": include})
        for name, value in weights.items():
            assert_equal(bytes_of(weights.fetch(name)), bytes_of(state[name]))
            assert (value.shape, value.dtype) == (state[name].shape, state[name].dtype)
        assert isinstance(weights["scalar"], OffloadedParameter) == (include == ["**"])
        assert not isinstance(weights["empty"], OffloadedParameter)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_permuted_parameters_keep_their_stride(tmp_path: Path) -> None:
    conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    with torch.device("meta"):
        model = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    safetensors.torch.save_file({n: v.contiguous() for n, v in conv.state_dict().items()}, tmp_path / "a.safetensors")
    for budget in ("100%", None):
        flextensor_fx.load(model, tmp_path, {**CONFIG, "budget": budget})
        assert model.weight.stride() == conv.weight.stride()
        assert_equal(model.weight.detach().clone(), conv.weight.detach().clone())
        flextensor_fx.release(model)


def test_a_model_with_values_gets_others_and_stays_the_same_objects(tmp_path: Path) -> None:
    net, model = trained(), Net().eval()
    held, optimizer = (
        dict(model.named_parameters()),
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad]),
    )
    flextensor_fx.load(model, one_file(net, tmp_path), {**CONFIG, "include_patterns": ["layers.*"], "budget": "60%"})
    assert streamed_names(model)
    assert_equal(dict(model.state_dict()), dict(net.state_dict()))
    assert model.embed.weight is held["embed.weight"]
    flextensor_fx.release(model)
    assert all(model.get_parameter(name) is parameter for name, parameter in held.items())
    assert_equal(dict(model.state_dict()), dict(net.state_dict()))
    optimizer.step()


# --- what does not fit -------------------------------------------------------------------------------------------------


def message_of(action: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)


def test_what_does_not_fit_is_said_as_load_state_dict_says_it(tmp_path: Path) -> None:
    state = dict(trained().state_dict())
    del state["layers.1.bias"], state["norm.running_var"]
    state["other.weight"] = torch.ones(2)
    state["layers.2.weight"] = torch.ones(3, 64)
    model = on_meta()
    expected = message_of(lambda: Net().load_state_dict(state))
    with pytest.raises(LoadError) as caught:
        flextensor_fx.load(model, state, CONFIG)
    assert str(caught.value) == expected
    expected = message_of(lambda: Net().load_state_dict(state, strict=False))
    with pytest.raises(LoadError) as caught:
        flextensor_fx.load(model, state, CONFIG, strict=False)
    assert str(caught.value) == expected
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not flextensor_fx.runtime.registry.living_sessions()


def test_without_strict_what_is_missing_stays_as_it_is(tmp_path: Path) -> None:
    state = dict(trained().state_dict())
    del state["layers.1.weight"]
    state["other"] = torch.ones(2)
    for model, stays in ((on_meta(), True), (Net().eval(), False)):
        before = model.layers[1].weight.detach().clone()
        with pytest.warns(UserWarning, match=r'Missing.*"layers\.1\.weight"\. \n\tUnexpected.*"other"') as told:
            flextensor_fx.load(model, state, CONFIG, strict=False)
        assert ('Still on the meta device, without a value: "layers.1.weight"' in str(told[0].message)) == stays
        assert model.layers[1].weight.is_meta == stays
        assert ("layers.1.weight" in streamed_names(model)) != stays
        assert_equal(model.layers[0].weight.detach().clone(), state["layers.0.weight"])
        if not stays:
            assert_equal(model.layers[1].weight.detach().clone(), before)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("selected", [True, False])
def test_one_name_of_a_tie_is_enough(name: str, selected: bool) -> None:
    net = trained()
    state = {n: v for n, v in net.state_dict().items() if n not in ("embed.weight", "head.weight") or n == name}
    for model in (on_meta(), Net().eval()):
        include = ["**"] if selected else ["layers.*"]
        flextensor_fx.load(model, state, {**CONFIG, "include_patterns": include})
        assert model.embed.weight is model.head.weight
        assert isinstance(model.head.weight, OffloadedParameter) == selected
        assert_equal(dict(model.state_dict()), dict(net.state_dict()))
    del state[name]
    with pytest.raises(LoadError, match=r'Missing key\(s\) in state_dict: "embed\.weight", "head\.weight"'):
        flextensor_fx.load(on_meta(), state, CONFIG)


def test_what_cannot_be_loaded_into_is_refused(tmp_path: Path) -> None:
    path = one_file(trained(), tmp_path)
    with pytest.raises(
        OffloadError, match=r"expected an nn\.Module, a function that makes one, or a mapping, found int"
    ):
        flextensor_fx.load(3, path, CONFIG)
    with pytest.raises(LoadError, match=r"expected the function to return an nn\.Module, found NoneType"):
        flextensor_fx.load(lambda: None, path, CONFIG)
    with pytest.raises(LoadError, match=r"0\.weight has no shape yet"):
        flextensor_fx.load(nn.Sequential(nn.LazyLinear(3)), path, CONFIG)
    model = on_meta()
    flextensor_fx.load(model, path, CONFIG)
    with pytest.raises(OffloadError, match=r"offloaded already; call flextensor_fx\.release"):
        flextensor_fx.load(model, path, CONFIG)


def test_enabled_false_loads_everything_into_memory(tmp_path: Path) -> None:
    net, model = trained(), on_meta()
    flextensor_fx.load(model, one_file(net, tmp_path), {**CONFIG, "enabled": False})
    assert_equal(dict(model.state_dict()), dict(net.state_dict()))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_recurrent_layers_compute_with_what_was_loaded() -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(8, 8, num_layers=2), torch.randn(3, 2, 8)
    with torch.device("meta"):
        model = nn.LSTM(8, 8, num_layers=2)
    with pytest.raises(OffloadError, match=r"cannot be offloaded: .*list of its weights"):
        flextensor_fx.load(model, lstm.state_dict(), {**CONFIG, "budget": "50%"})
    flextensor_fx.load(model, lstm.state_dict(), CONFIG)
    assert_equal(model(x)[0], lstm(x)[0])


class Stateful(nn.Linear):
    """Has state beside its tensors."""

    def get_extra_state(self) -> Any:
        return getattr(self, "state", None)

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_state_beside_tensors_comes_from_a_mapping(tmp_path: Path) -> None:
    source, model = Stateful(4, 4), Stateful(4, 4)
    source.state = {"epoch": 3}
    flextensor_fx.load(model, source.state_dict(), CONFIG)
    assert model.state == {"epoch": 3}
    state = {name: value for name, value in source.state_dict().items() if name != "_extra_state"}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(LoadError, match=r'Missing key\(s\) in state_dict: "_extra_state"'):
        flextensor_fx.load(Stateful(4, 4), tmp_path, CONFIG)


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_what_host_memory_has_no_room_for_is_mapped_from_its_file(shift: int, tmp_path: Path) -> None:
    net, tokens = trained(144), torch.randint(0, 40, (5,))
    path = Path(one_file(net, tmp_path))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].ljust(length + shift)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    config = {**CONFIG, "store": "host", "host_budget": 100_000, "inner_backend": "aot_eager"}
    model = on_meta(144)
    flextensor_fx.load(model, path, config)
    store = session_of(model).engine.store
    assert store.host_bytes <= 100_000
    assert len(store._in_place) == (0 if shift == 1 else 3)
    expected = net(tokens)
    with torch.no_grad():
        assert_equal(torch.compile(model, backend=flextensor_fx.flextensor)(tokens), expected.detach())
        before = path.read_bytes()
        model.layers[2].weight.zero_()
        assert not model.layers[2].weight.any()
        assert path.read_bytes() == before
        if shift != 1:
            path.write_bytes(bytes(len(before)))
            os.utime(path, (1, 1))
            with pytest.raises(StoreError, match="as it was when it was attached"):
                model.layers[1].weight.sum()
