"""What generated code must keep to, given the schedule that was written into its graph. Each check raises a CodeError.

Positions are places in `Wrapper.events`. A weight's memory is that of its wait's result.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cuda_code import Generated
from cuda_events import CodeError, Event, Wrapper, read
from flextensor_fx.passes.schedule import Schedule, Transfer
from flextensor_fx.passes.steady_schedule import SteadySchedule

ALIGNMENT = 16  # bytes; Triton's hint, and what Inductor asserts of the result of an op that it does not know

# A weight must be read where it is. Such calls also move between devices.
_COPIES = re.compile(
    r"\baten\.(clone|copy_?|_to_copy|contiguous|lift_fresh_copy|constant_pad_nd)\b|device_put|record_stream"
)


@dataclass(frozen=True)
class Stay:
    """One transfer in the code: the places of its three calls, its memory, and where that is given up.

    Fields:
        end: place of the event at which the last name of the memory goes, or at which it becomes another value's memory.
        reused: whether it becomes another value's.
    """

    transfer: Transfer
    prefetch: int
    wait: int
    offload: int
    memory: int
    end: int
    reused: bool

    @property
    def key(self) -> str:
        return self.transfer.key


def check(found: Generated) -> Wrapper:
    """Runs all checks. Returns what was read, for those of a single test."""
    wrapper = read(found.code)
    stays = stays_of(found, wrapper)
    check_order(found, wrapper, stays)
    check_readers(wrapper, stays)
    check_memory(found, wrapper, stays)
    check_device(found, wrapper)
    check_alignment(found, wrapper, stays)
    check_no_copies(wrapper, stays)
    check_cuda_graphs(found, wrapper)
    return wrapper


def in_call(found: Generated) -> Schedule:
    """The schedule as one call has it."""
    made = found.schedule
    assert made is not None
    return made.in_call if isinstance(made, SteadySchedule) else made


def stays_of(found: Generated, wrapper: Wrapper) -> list[Stay]:
    """The transfers of the schedule in the code, in its order; each must have its three calls, in order."""
    places: dict[str, list[int]] = {kind: [] for kind in ("prefetch", "wait", "offload")}
    for place, event in enumerate(wrapper.events):
        if event.kind in places:
            places[event.kind].append(place)
    transfers = in_call(found).transfers
    by_key = {kind: _by_key(wrapper, at) for kind, at in places.items()}
    expected = Counter(t.key for t in transfers)
    for kind, at in by_key.items():
        if (seen := Counter({key: len(found) for key, found in at.items()})) != expected:
            raise CodeError(
                f"{kind}: expected a call for each transfer, found {seen - expected} too many, {expected - seen} too few"
            )
    seen_of: Counter[str] = Counter()
    stays = []
    for transfer in transfers:
        number = seen_of[transfer.key]
        seen_of[transfer.key] += 1
        prefetch, wait, offload = (by_key[kind][transfer.key][number] for kind in ("prefetch", "wait", "offload"))
        if not prefetch < wait < offload:
            raise CodeError(
                f"{transfer.key}: expected prefetch, wait, offload, found them at {prefetch}, {wait}, {offload}"
            )
        token, (memory,) = wrapper.events[prefetch].writes, wrapper.events[wait].writes
        if [a.memory for a in wrapper.events[wait].reads] != list(token):
            raise CodeError(f"{wrapper.events[wait]}: expected the token of its prefetch")
        if [a.memory for a in wrapper.events[offload].reads] != [memory]:
            raise CodeError(f"{wrapper.events[offload]}: expected the weight of its wait")
        stays.append(Stay(transfer, prefetch, wait, offload, memory, *_end(wrapper, memory, wait, offload)))
    return stays


def check_order(found: Generated, wrapper: Wrapper, stays: list[Stay]) -> None:
    """Prefetches come in the schedule's order, each after all offloads that free its memory; waits come after all prefetches that
    the schedule issues before them, and after the readers of earlier steps."""
    if [s.prefetch for s in stays] != sorted(s.prefetch for s in stays):
        raise CodeError(f"prefetches are not in the order of the schedule: {[s.key for s in stays]}")
    for stay in stays:
        for other in stays:
            if other.transfer.last_use < stay.transfer.issue_at and not other.end < stay.prefetch:
                raise CodeError(
                    f"prefetch {stay.key}: expected after the memory of {other.key} is given up\n{wrapper.events[other.end]}"
                )
            if other.transfer.issue_at <= stay.transfer.first_use and not other.prefetch < stay.wait:
                raise CodeError(
                    f"wait {stay.key}: expected after prefetch {other.key}, which the schedule issues before it"
                )
            if other.transfer.first_use < stay.transfer.first_use and not other.wait < stay.wait:
                raise CodeError(f"wait {stay.key}: expected after wait {other.key}, of an earlier step")
    _check_ahead(found, wrapper, stays)


def _check_ahead(found: Generated, wrapper: Wrapper, stays: list[Stay]) -> None:
    ahead = {event.what: place for place, event in enumerate(wrapper.events) if event.kind == "prefetch_ahead"}
    made = found.schedule
    expected = made.ahead if isinstance(made, SteadySchedule) else ()
    if list(ahead) != [t.key for t in expected]:
        raise CodeError(f"prefetches ahead: expected {[t.key for t in expected]}, found {list(ahead)}")
    for transfer in expected:
        assert isinstance(made, SteadySchedule)
        place, boundary = ahead[transfer.key], transfer.issue_at + made.steps
        for other in stays:
            if other.transfer.last_use < boundary and not other.end < place:
                raise CodeError(f"prefetch_ahead {transfer.key}: expected after the memory of {other.key} is given up")
            if other.transfer.first_use >= boundary and not place < other.wait:
                raise CodeError(f"wait {other.key}: expected after prefetch_ahead {transfer.key}")


def check_readers(wrapper: Wrapper, stays: list[Stay]) -> None:
    """A weight is read between its wait and its offload, and written nowhere there."""
    touched: defaultdict[int, list[int]] = defaultdict(list)
    for place, event in enumerate(wrapper.events):
        if event.kind == "kernel":
            for memory in {*(a.memory for a in event.reads), *event.writes}:
                touched[memory].append(place)
    for stay in stays:
        readers = 0
        for place in touched[stay.memory]:
            event = wrapper.events[place]
            if place < stay.wait or (place > stay.offload and not (stay.reused and place > stay.end)):
                raise CodeError(f"{stay.key}: used outside of its wait and offload\n{event}")
            if place < stay.offload and stay.memory in event.writes:
                raise CodeError(f"{stay.key}: written while it is a weight\n{event}")
            readers += place < stay.offload
        if not readers:
            raise CodeError(f"{stay.key}: no kernel reads it")


def check_memory(found: Generated, wrapper: Wrapper, stays: list[Stay]) -> None:
    """A weight's memory is given up right behind its offload, and the pool is never exceeded."""
    for stay in stays:
        between = [e for e in wrapper.events[stay.offload + 1 : stay.end] if e.kind not in ("alloc", "free", "reuse")]
        if between:
            raise CodeError(f"{stay.key}: kept after its offload while other work starts\n{between[0]}")
    pool = in_call(found).pool
    changes: list[tuple[int, int, str]] = [(s.prefetch, found.weights[s.key].nbytes, s.key) for s in stays]
    changes += [(s.end, -found.weights[s.key].nbytes, s.key) for s in stays]
    ahead = [(place, e.what) for place, e in enumerate(wrapper.events) if e.kind == "prefetch_ahead"]
    held, taken_over = sum(found.weights[key].nbytes for _, key in ahead), {key for _, key in ahead}
    changes += [(place, found.weights[key].nbytes, key) for place, key in ahead]
    for place, nbytes, key in sorted(changes):
        if wrapper.events[place].kind == "prefetch" and key in taken_over:
            taken_over.remove(key)  # the copy that the call before has started
            continue
        held += nbytes
        if held > pool:
            raise CodeError(f"{wrapper.events[place]}: {held} bytes of weights are held, the pool has {pool}")


def check_device(found: Generated, wrapper: Wrapper) -> None:
    """One device guard, and no other device: not the CPU, for which Inductor would switch guards and refuse CUDA graphs."""
    index = found.request.index
    if wrapper.guards != [index]:
        raise CodeError(f"expected one guard of device {index}, found {wrapper.guards}")
    if others := wrapper.devices - {"cuda", f"cuda:{index}"}:
        raise CodeError(f"expected only cuda:{index}, found {sorted(others)}")
    if host := [name for name in wrapper.kernels if name.startswith("cpp_")]:
        raise CodeError(f"expected no loop on the CPU, found {host[0]}")


def check_alignment(found: Generated, wrapper: Wrapper, stays: list[Stay]) -> None:
    """What a wait gives is asserted to be aligned, and every kernel that counts on it reads at an aligned place.

    Inductor takes the results of ops that it does not know for aligned, says so to Triton, and asserts it at run time. Engines
    keep to it: device memory comes from torch's allocator, whose blocks begin at multiples of 512 bytes.
    """
    stay_of = {stay.memory: stay for stay in stays}
    for stay in stays:
        if (stay.memory, ALIGNMENT) not in wrapper.checked:
            raise CodeError(f"{stay.key}: nothing asserts that what the wait gives is aligned to {ALIGNMENT} bytes")
    for place, event in enumerate(wrapper.events):
        for argument in event.reads if event.kind == "kernel" else ():
            stay = stay_of.get(argument.memory)
            if stay is None or place > stay.offload or argument.aligned is None:
                continue
            aligned = argument.start * found.weights[stay.key].dtype.itemsize % ALIGNMENT == 0
            if aligned != argument.aligned:
                raise CodeError(
                    f"{stay.key}: read at element {argument.start}, and the kernel's hint says {argument.aligned}\n{event}"
                )


def check_no_copies(wrapper: Wrapper, stays: list[Stay]) -> None:
    """No call copies, and no kernel reads a weight alone: all that it could do is write the weight out in another form."""
    weights = {stay.memory: stay for stay in stays}
    for place, event in enumerate(wrapper.events):
        if event.kind != "kernel":
            continue
        if _COPIES.search(event.what):
            raise CodeError(f"a copy in generated code\n{event}")
        read_here = {a.memory for a in event.reads}
        if len(read_here) == 1 and (stay := weights.get(*read_here)) is not None and place < stay.offload:
            raise CodeError(f"{stay.key}: a kernel reads it and nothing else, so it copies it\n{event}")


def check_cuda_graphs(found: Generated, wrapper: Wrapper) -> None:
    """Where CUDA graphs were asked for, all of the graph is captured, in one piece."""
    if found.cuda_graphs is None:
        return
    if not found.cuda_graphs.on or found.cuda_graphs.refusal or found.cuda_graphs.doubts:
        raise CodeError(f"Inductor will use no CUDA graph: {found.cuda_graphs}")
    if wrapper.outside:
        raise CodeError(f"not captured: {wrapper.outside}")
    if len(wrapper.partitions) > 1:
        raise CodeError(f"expected one CUDA graph, found {wrapper.partitions}")


def kernel_kinds(wrapper: Wrapper) -> Counter[str]:
    """How many kernels of each kind: Triton's by kind of loop, others by name."""
    return Counter(re.sub(r"^(triton_[a-z]+)_.*", r"\1", name) for name in wrapper.kernels)


def delays(wrapper: Wrapper, stays: list[Stay]) -> Iterator[tuple[str, int]]:
    """For each prefetch: the kernels that start between the last thing that it must come after and itself."""
    made = {
        memory: place for place, event in enumerate(wrapper.events) for memory in event.writes if event.kind != "free"
    }
    for stay in stays:
        event: Event = wrapper.events[stay.prefetch]
        since = max((made[wrapper.wholes.get(m, m)] for m in event.after), default=-1)
        yield stay.key, sum(e.kind == "kernel" for e in wrapper.events[since + 1 : stay.prefetch])


def _by_key(wrapper: Wrapper, places: list[int]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place in places:
        found[wrapper.events[place].what].append(place)
    return dict(found)


def _end(wrapper: Wrapper, memory: int, wait: int, offload: int) -> tuple[int, bool]:
    for place in range(wait + 1, len(wrapper.events)):
        event = wrapper.events[place]
        if memory in event.writes and event.kind in ("free", "reuse"):
            if place < offload:
                raise CodeError(f"{wrapper.events[wait].what}: its memory is given up before its offload\n{event}")
            return place, event.kind == "reuse"
    raise CodeError(f"{wrapper.events[wait].what}: its memory is never given up")
