import gc
import mmap
import threading
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flextensor_fx.runtime.arena import Arena, Block

PAGE = 4096


def resident_bytes(array: np.ndarray) -> int:
    """Bytes of the array's pages that are in memory, by the kernel's own count."""
    address = array.__array_interface__["data"][0]
    pages = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // PAGE * 8)
        for entry in np.frombuffer(file.read(len(array) // PAGE * 8), np.uint64):
            pages += int(entry) >> 63
    return pages * PAGE


def take(arena: Arena, nbytes: int) -> Block:
    block = arena.take(nbytes)
    assert block is not None
    return block


def test_a_block_is_page_aligned_and_writable():
    block = take(Arena(1 << 20), 5000)
    assert len(block.array) == 2 * PAGE
    assert block.array.__array_interface__["data"][0] == block.address
    assert block.address % PAGE == 0
    block.array.fill(7)
    assert int(block.array.sum()) == 7 * 2 * PAGE


def test_no_block_beyond_the_limit_unless_forced():
    arena = Arena(2 * PAGE)
    held = [take(arena, PAGE), take(arena, PAGE)]
    assert arena.take(1) is None
    forced = arena.take(1, force=True)
    assert forced is not None
    assert arena.stats().live_bytes == 3 * PAGE
    held.clear()
    del forced
    assert arena.stats().live_bytes == 0
    assert arena.stats().touched_bytes == 2 * PAGE
    assert arena.stats().peak_live == 3 * PAGE


def test_a_block_returns_with_the_last_tensor_that_holds_it():
    arena = Arena(PAGE)
    block = take(arena, PAGE)
    tensor = torch.from_numpy(block.array)
    view = tensor.view(torch.float32).as_strided((2, 3), (3, 1))[1:]
    del block, tensor
    assert arena.take(PAGE) is None
    del view
    assert arena.take(PAGE) is not None


def test_memory_is_reused():
    arena = Arena(4 * PAGE)
    first = take(arena, 3 * PAGE)
    address = first.address
    del first
    assert take(arena, 3 * PAGE).address == address
    assert take(arena, 2 * PAGE).address == address
    assert arena.stats().touched_bytes == 3 * PAGE


def test_pages_are_handed_back_where_touched_would_exceed_the_limit():
    arena = Arena(6 * PAGE)
    blocks = [take(arena, 2 * PAGE) for _ in range(3)]
    for block in blocks:
        block.array.fill(1)
    kept = blocks[1]
    blocks.clear()
    del block
    big = take(arena, 4 * PAGE)
    assert arena.stats().touched_bytes <= 6 * PAGE
    assert int(kept.array.sum()) == 2 * PAGE
    assert len(big.array) == 4 * PAGE


def test_lowering_the_limit_hands_pages_back_to_the_system():
    arena = Arena(64 * PAGE)
    block = take(arena, 64 * PAGE)
    block.array.fill(1)
    assert resident_bytes(block.array) in (0, 64 * PAGE)  # 0 where pagemap hides it
    del block
    arena.set_limit(8 * PAGE)
    assert arena.stats().touched_bytes == 8 * PAGE
    arena.set_limit(64 * PAGE)
    again = take(arena, 64 * PAGE)
    assert int(np.count_nonzero(again.array)) == 8 * PAGE


def test_every_call_needs_as_many_fresh_pages_as_the_first():
    sizes = [4, 2, 2, 4, 11, 11, 11] * 8
    arena = Arena(23 * PAGE)
    layouts = []
    for _ in range(4):
        held: deque[Block] = deque()
        layout = []
        for size in sizes:
            while sum(len(block.array) for block in held) + size * PAGE > 23 * PAGE:
                held.popleft()
            held.append(take(arena, size * PAGE))
            layout.append(held[-1].address)
        held.clear()
        layouts.append(layout)
    assert layouts[1] == layouts[2] == layouts[3]


def test_given_up_blocks_do_not_count():
    arena = Arena(PAGE)
    held = [take(arena, PAGE)]
    assert arena.give_up(held[0].address + 64)
    assert not arena.give_up(held[0].address)
    second = take(arena, PAGE)
    assert second.address != held[0].address
    assert arena.stats().live_bytes == PAGE
    assert arena.stats().given_up_bytes == PAGE
    held.clear()
    assert arena.stats().given_up_bytes == 0
    assert arena.stats().touched_bytes == PAGE
    assert not arena.give_up(12345)


def test_room_is_announced_and_a_callback_in_the_middle_of_take_does_no_harm():
    rooms = []
    arena = Arena(1 << 20, lambda: rooms.append(1))
    loop = [take(arena, PAGE)]
    loop.append(loop)  # type: ignore[arg-type]
    del loop
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            cycle = [take(arena, PAGE)]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert arena.stats().live_bytes == 0
    assert len(rooms) == 51


def test_threads_may_take_and_return_together():
    arena = Arena(64 * PAGE)
    bad = []

    def work(mark: int) -> None:
        for n in range(300):
            block = arena.take(PAGE * (1 + n % 3))
            if block is not None:
                block.array.fill(mark)
                if int(block.array.min()) != mark or int(block.array.max()) != mark:
                    bad.append(n)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert arena.stats().live_bytes == 0


def test_more_address_space_than_the_first_region():
    arena = Arena(1 << 30)
    blocks = [take(arena, 40 << 20) for _ in range(4)] + [arena.take(3 << 30, force=True)]
    assert len({block.address for block in blocks if block}) == 5


def test_no_address_space_is_a_memory_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="8192 bytes"):
        Arena(1 << 20).take(8192)


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "force", "drop", "give_up", "limit"]), st.integers(1, 17)), max_size=60
    ),
)
def test_blocks_never_overlap_and_the_limit_holds(limit: int, steps: list[tuple[str, int]]):
    arena = Arena(limit * PAGE)
    held: dict[int, np.ndarray] = {}
    given_up: set[int] = set()
    for mark, (step, n) in enumerate(steps, 1):
        if step in ("take", "force"):
            live = sum(len(a) for m, a in held.items() if m not in given_up)
            block = arena.take(n * PAGE, force=step == "force")
            assert (block is not None) == (step == "force" or live + n * PAGE <= limit * PAGE)
            if block is not None:
                block.array.fill(mark)
                held[mark] = block.array
            del block
        elif step == "limit":
            limit = n
            arena.set_limit(n * PAGE)
        elif held:
            chosen = list(held)[n % len(held)]
            if step == "drop":
                del held[chosen]
                given_up.discard(chosen)
            else:
                address = held[chosen].__array_interface__["data"][0]
                assert arena.give_up(address) == (chosen not in given_up)
                given_up.add(chosen)
        stats = arena.stats()
        assert stats.live_bytes == sum(len(a) for m, a in held.items() if m not in given_up)
        assert stats.given_up_bytes == sum(len(held[m]) for m in given_up)
        assert stats.touched_bytes - stats.given_up_bytes <= max(limit * PAGE, stats.live_bytes)
        assert all(int(array.min()) == int(array.max()) == m for m, array in held.items())
    held.clear()
    stats = arena.stats()
    assert stats.live_bytes == stats.given_up_bytes == 0


def test_a_limit_that_is_no_whole_page_is_trimmed_in_whole_pages() -> None:
    arena = Arena(4 * 4096 + 1)
    blocks = [arena.take(4096) for _ in range(4)]
    assert all(blocks)
    blocks.clear()
    for limit in (2 * 4096 + 1, 4097, 1):
        arena.set_limit(limit)
        assert arena.stats().touched_bytes <= limit
