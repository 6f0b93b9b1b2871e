"""The modelled device itself: order, late copies, memory, host memory, and what it reports."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from flextensor_fx.runtime.device import Device, PinError
from modelled_device import ModelledDevice
from modelled_kernels import Watching
from modelled_queue import by_the_model
from modelled_races import Kind
from modelled_steps import PAGE, Host, after, kinds, new, streams, transfer


def test_it_has_the_interface() -> None:
    device: Device = ModelledDevice()
    assert device.device == torch.device("cpu") and device.current_stream() == device.current_stream()


def test_copy_arrives_when_somebody_waits_for_it() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        host.tensor.fill_(3)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        with by_the_model():
            assert tensor.isnan().all() and tensor.view(torch.uint8).eq(0xFF).all()
        after(device, compute, copies)
        assert tensor.eq(3).all()
        device.assert_no_race()


def test_copy_arrives_with_a_synchronisation_and_for_work_on_its_own_stream() -> None:
    with streams() as (device, compute, copies):
        host, one, two = Host(device), new(device), new(device)
        after(device, copies, compute)
        device.copy(one, host.tensor[:16], copies)
        device.synchronize()
        with device.stream(copies):
            device.copy(two, host.tensor[:16], copies)
            assert one.eq(0).all() and two.eq(0).all()
        device.assert_no_race()


def test_copy_between_tensors_that_lie_differently() -> None:
    device = ModelledDevice()
    host, copies = Host(device), device.new_stream()
    source = host.tensor[:24].copy_(torch.arange(24.0)).view(4, 6).t()
    for size, stride, dtype in [
        ((6, 4), (4, 1), torch.float32),
        ((6, 4), (8, 1), torch.float32),
        ((6, 4), (4, 1), torch.float64),
    ]:
        tensor = device.empty(size, stride, dtype)
        device.copy(tensor, source, copies)
        assert tensor.view(torch.uint8).eq(0xFF).all()
        device.synchronize()
        assert tensor.eq(source).all()


def test_copies_into_parts_of_a_tensor_do_not_meet() -> None:
    with streams() as (device, compute, copies):
        host, tensor, other = Host(device), new(device, 32), device.new_stream()
        for stream, part in ((copies, tensor[:16]), (other, tensor[16:])):
            after(device, stream, compute)
            device.copy(part, host.tensor[:16], stream)
        after(device, compute, copies)
        torch.add(tensor[:16], 1)
        device.assert_no_race()
        torch.add(tensor, 1)
        assert kinds(device) == [Kind.UNARRIVED]


def test_wait_for_an_event_never_recorded_is_for_nothing() -> None:
    with streams() as (device, _, copies):
        host, tensor = Host(device), new(device)
        device.wait(copies, device.new_event())
        device.copy(tensor, host.tensor[:16], copies)
        assert kinds(device) == [Kind.UNALLOCATED]


def test_wait_is_for_the_last_record_before_it() -> None:
    with streams() as (device, compute, copies):
        host, tensor, event = Host(device), new(device), device.new_event()
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        device.record(event, copies)
        device.wait(compute, event)
        device.record(event, device.new_stream())  # too late to matter
        torch.add(tensor, 1)
        device.assert_no_race()

        device.copy(tensor, host.tensor[:16], copies)
        assert kinds(device) == [Kind.OVERWRITTEN]
        device.record(event, copies)
        device.record(event, compute)
        device.wait(compute, event)
        torch.add(tensor, 1)
        assert kinds(device)[1:] == [Kind.UNARRIVED]


def test_order_goes_through_other_streams() -> None:
    with streams() as (device, compute, copies):
        host, tensor, between = Host(device), new(device), device.new_stream()
        after(device, between, compute)
        after(device, copies, between)
        device.copy(tensor, host.tensor[:16], copies)
        after(device, between, copies)
        after(device, compute, between)
        torch.add(tensor, 1)
        device.assert_no_race()


def test_overwritten_before_the_last_reader() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        after(device, compute, copies)
        torch.add(tensor, 1)
        device.copy(tensor, host.tensor[16:32], copies)
        assert kinds(device) == [Kind.OVERWRITTEN]


def test_kernels_on_streams_without_order() -> None:
    with streams() as (device, _, _):
        made, other = torch.ones(4) + 1, device.user_stream()
        with device.stream(other):
            torch.add(made, 1)
        assert kinds(device) == [Kind.UNALLOCATED, Kind.UNWRITTEN]
        made.add_(1)
        assert kinds(device)[2:] == [Kind.OVERWRITTEN]


def test_race_says_what_and_where() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        device.name_tensor(tensor, "layers.0.weight")
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        torch.add(tensor, 1)
        assert str(device.races[0]) == (
            "read before arrival: layers.0.weight: aten.add.Tensor of layers.0.weight on the default stream does not come after "
            "copy of layers.0.weight on stream 1"
        )
        with pytest.raises(AssertionError, match=r"1 races:\nread before arrival: layers.0.weight"):
            device.assert_no_race()


def test_memory_goes_to_the_next_allocation_on_its_stream_only() -> None:
    device = ModelledDevice()
    first, second = new(device, 1000), new(device, 1000)
    start, other_start = (device.place(tensor)[3] for tensor in (first, second))
    del first, second
    with device.stream(device.new_stream()):
        elsewhere = new(device, 1000)
    small, exact, rest = new(device, 200), new(device, 1000), new(device, 700)
    places = [device.place(tensor)[3] for tensor in (elsewhere, small, exact, rest)]
    assert places == [2 * 4096, other_start, start, other_start + 1024]  # the last that came back is the first to go


def test_memory_comes_back_with_the_last_reference() -> None:
    device = ModelledDevice()
    tensor = new(device)
    view = tensor[4:].detach()
    gc.collect()
    del tensor
    assert device.allocated_bytes == 512
    del view
    assert device.allocated_bytes == 0 and device.peak_allocated() == 512


def test_results_of_kernels_are_memory_of_the_device() -> None:
    device = ModelledDevice()
    with device.watching():
        made = torch.ones(1000)
        view = made.view(10, 100)[:5]
        assert device.place(view)[:2] == device.place(made)[:2] and device.allocated_bytes == 4096
        parts = torch.ops.aten.native_layer_norm(view, [100], None, None, 1e-5)
        assert len({device.place(part)[1] for part in parts}) == 3
        place = device.place(made)[3]
        del made, view, parts
        again = torch.zeros(1000)
        assert device.place(again)[3] == place


def test_freed_before_its_last_use() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        del tensor
        assert not device.races  # nobody could have got the memory yet
        other = new(device, 5000)
        assert kinds(device) == [Kind.FREED]
        del other


def test_freed_behind_its_last_use() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        del tensor
        after(device, compute, copies)
        new(device)
        device.assert_no_race()


def test_out_of_memory() -> None:
    device = ModelledDevice(total_bytes=4096)
    held = new(device, 512)
    assert device.memory() == (2048, 4096)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 2560 bytes, 2048 of 4096"):
        new(device, 513)
    with device.watching(), pytest.raises(torch.OutOfMemoryError):
        torch.cat([held, held])
    assert device.memory() == (2048, 4096)


def test_pins_whole_pages_once() -> None:
    device = ModelledDevice(fail_pin_at=2, pin_limit=8 * PAGE)
    device.pin(4 * PAGE, 2 * PAGE)
    with pytest.raises(PinError, match="out of memory"):
        device.pin(8 * PAGE, PAGE)
    for address, pages in ((4 * PAGE, 1), (5 * PAGE, 1), (3 * PAGE, 2), (3 * PAGE, 9), (PAGE + 8, 1), (20 * PAGE, 7)):
        with pytest.raises(PinError):
            device.pin(address, pages * PAGE)
    assert device.pinned_bytes == 2 * PAGE and device.pinned_ranges == [(4 * PAGE, 6 * PAGE)]
    device.pin(3 * PAGE, PAGE)
    device.pin(6 * PAGE, PAGE)
    device.unpin(4 * PAGE)
    assert device.pinned_ranges == [(3 * PAGE, 4 * PAGE), (6 * PAGE, 7 * PAGE)]
    with pytest.raises(AssertionError, match="no pinned range starts there"):
        device.unpin(4 * PAGE)


@pytest.mark.parametrize("how", ["op", "on_host", "said", "unseen"])
@pytest.mark.parametrize("ordered", [False, True])
def test_host_writes_what_a_copy_may_read(how: str, ordered: bool) -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        if ordered:
            device.synchronize()
        host.tensor[16:].fill_(5)
        device.assert_no_race()
        if how == "op":
            host.tensor[:4].fill_(5)
        elif how == "on_host":
            with device.on_host():
                host.tensor.copy_(torch.zeros(PAGE // 4))
        elif how == "said":
            device.host_wrote(host.tensor[:4])
        else:
            host.memory[0:4] = b"abcd"
        assert kinds(device) == [Kind.SOURCE_WRITTEN] * (not ordered)
        device.synchronize()
        assert kinds(device) == [Kind.SOURCE_WRITTEN] * (not ordered)


def test_item_has_the_host_wait_for_the_stream() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device), new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        after(device, compute, copies)
        assert tensor.sum().item() == 0
        host.tensor.fill_(5)
        device.assert_no_race()


def test_unpinned_while_a_copy_may_read_it() -> None:
    device = ModelledDevice()
    host, copies = Host(device), device.new_stream()
    host.tensor.fill_(7)
    tensor = new(device)
    device.copy(tensor, host.tensor[:16], copies)
    device.unpin(host.address)
    assert kinds(device) == [Kind.SOURCE_UNPINNED]
    host.tensor = None
    host.memory.close()  # nothing of the model refers to it


def test_pageable_copy_takes_the_bytes_at_once() -> None:
    with streams() as (device, compute, copies):
        host, tensor = Host(device, pin=False), new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        host.tensor.fill_(5)
        after(device, compute, copies)
        assert tensor.eq(0).all()
        device.assert_no_race()


def test_time_between_marks_that_the_host_has_waited_for() -> None:
    device = ModelledDevice()
    begin, end = device.mark(device.current_stream()), device.mark(device.new_stream())
    with pytest.raises(RuntimeError, match="synchronise first"):
        device.ms_between(begin, end)
    device.synchronize()
    assert device.ms_between(begin, end) >= 0


def test_devices_are_apart() -> None:
    one, two = ModelledDevice(name="one"), ModelledDevice(name="two")
    with Watching(one, two):
        here, there = new(one), new(two)
        there2 = there + 1
        assert one.block(here) and not two.block(here) and two.block(there2) and not one.block(there2)
        with two.stream(two.user_stream()):
            torch.add(there2, 1)
    assert kinds(one) == [] and "user stream 1 of two" in str(two.races[0])


def test_each_thread_has_its_current_stream() -> None:
    device, seen = ModelledDevice(), []
    with device.stream(device.user_stream()):
        thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
        thread.start()
        thread.join()
    assert seen == [device.default_stream]


def test_compiled_graphs_are_seen() -> None:
    with streams() as (device, compute, copies):
        host = Host(device)
        compiled = torch.compile(lambda x, w: torch.relu(x * w).sum(0), backend="aot_eager", fullgraph=True)
        tensor = new(device)
        after(device, copies, compute)
        device.copy(tensor, host.tensor[:16], copies)
        compiled(torch.ones(16), tensor)
        assert kinds(device)[:1] == [Kind.UNARRIVED] and "aten.mul.Tensor" in str(device.races[0])


def test_gradients_are_seen() -> None:
    with streams() as (device, _, copies):
        host = Host(device)
        host.tensor.fill_(2)
        x = torch.ones(16, requires_grad=True)
        y = x * transfer(device, host.tensor[:16], copies)
        device.copy(new(device), host.tensor[:16], copies)
        y.sum().backward()
        assert x.grad is not None and x.grad.eq(2).all()
        with by_the_model():
            assert device.block(x.grad) is not None
