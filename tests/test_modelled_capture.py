"""Captures on the modelled device: replays, and what must not be in one."""

from __future__ import annotations

import pytest
import torch

from modelled_races import Kind
from modelled_steps import Host, after, kinds, new, streams, transfer


def test_replay_copies_and_computes_anew() -> None:
    with streams() as (device, _, copies):
        host = Host(device)
        assert not device.capturing()
        with device.capture() as graph:
            assert device.capturing()
            weight = transfer(device, host.tensor[:16], copies)
            result = weight * 2
            del weight
            second = transfer(device, host.tensor[16:32], copies)  # in the memory that the first had
            total = result + second
            del second
        assert not device.capturing() and graph.copies == 2
        for value in (3, 4):
            device.synchronize()
            host.tensor.fill_(value)
            graph.replay()
            assert total.eq(3 * value).all()
        device.assert_no_race()


def test_replay_may_read_host_memory_until_the_host_waits() -> None:
    with streams() as (device, _, copies):
        host = Host(device)
        with device.capture() as graph:
            transfer(device, host.tensor[:16], copies)
        host.tensor.fill_(1)  # nothing has been run
        device.assert_no_race()
        graph.replay()
        host.tensor.fill_(2)
        assert kinds(device) == [Kind.SOURCE_WRITTEN]


def test_replay_comes_after_its_stream_only() -> None:
    with streams() as (device, _, _):
        static = torch.zeros(16)
        with device.capture() as graph:
            torch.add(static, 1)
        static.add_(1)
        graph.replay()
        device.assert_no_race()
        static.add_(1)
        with device.stream(device.user_stream()):
            graph.replay()
        assert Kind.UNWRITTEN in kinds(device)


def test_replay_from_memory_that_is_unpinned() -> None:
    with streams() as (device, _, copies):
        host = Host(device)
        with device.capture() as graph:
            result = transfer(device, host.tensor[:16], copies) + 1
        device.unpin(host.address)
        device.assert_no_race()
        host.tensor = None
        host.memory.close()
        graph.replay()
        assert kinds(device) == [Kind.SOURCE_UNPINNED] and result.isnan().all()


def test_capture_left_unjoined() -> None:
    with streams() as (device, compute, copies):
        host = Host(device)
        with device.capture():
            tensor = new(device)
            after(device, copies, compute)
            device.copy(tensor, host.tensor[:16], copies)
        assert kinds(device) == [Kind.CAPTURE_UNJOINED] and not device.capturing()


def test_fork_without_work_need_not_join() -> None:
    with streams() as (device, compute, copies):
        with device.capture():
            after(device, copies, compute)
        device.assert_no_race()


def test_waits_do_not_cross_the_edge_of_a_capture() -> None:
    with streams() as (device, compute, copies):
        outside, inside = device.new_event(), device.new_event()
        device.record(outside, copies)
        with device.capture():
            device.wait(compute, outside)
            assert kinds(device) == [Kind.CAPTURE_ISOLATION]
            device.record(inside, compute)
        device.wait(compute, inside)
        assert kinds(device) == [Kind.CAPTURE_ISOLATION] * 2
        assert "an event recorded outside of it" in str(device.races[0]) and "an ended capture" in str(device.races[1])


def test_capture_takes_no_pageable_copy_and_no_synchronisation() -> None:
    with streams() as (device, _, copies):
        host = Host(device, pin=False)
        with device.capture():
            transfer(device, host.tensor[:16], copies)
            device.synchronize()
        assert kinds(device) == [Kind.CAPTURE_PAGEABLE, *[Kind.CAPTURE_SYNCHRONIZED] * 2]


def test_capture_ends_with_an_error_in_it() -> None:
    with streams() as (device, compute, copies):

        def fail() -> None:
            with device.capture():
                after(device, copies, compute)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert not device.capturing()
        transfer(device, Host(device).tensor[:16], copies)
        device.assert_no_race()
