"""How long does loading a model take that never fits in memory, and how much memory?

A Llama of 2 GB on the meta device is loaded from sharded safetensors files whose pages are not in memory, at a budget of 25%.
Every case is a process of its own, which has loaded a small model before; loads and plain reads take turns in it.

1. Peak resident set over what the process had, in shares of the budget and the largest weight together: at most 1.05.
2. In place (the files' dtype is the model's): time against one thread that reads all files into one buffer, in pieces of 64 MB
   past the page cache: at most 1.2. With the layers alone selected, time against such a thread that reads what stays resident,
   which is all that the load reads, into memory of its own: at most 1.2.
3. Converted (the files are bfloat16, or the model is): time against reading all bytes of the files so, and then writing as many
   as the store gets to a file, as a program does that reads and then writes: at most 1.2.
4. Time and memory against those of accelerate's `load_checkpoint_and_dispatch` with all layers on disk, from the same files.
5. Time until the first call of the compiled model has an answer, beside that of a model that is resident; accelerate's is not
   compiled.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import Check, Output, build_llama, command_line, finish, paired
from memory import measured

import flextensor_fx
from flextensor_fx.runtime.container import read_entries, read_names

FULL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QUICK: dict[str, Any] = {
    **FULL,
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
}
PIECE = 64 << 20
Found = dict[str, list[float]]
CONFIG: dict[str, Any] = {"include_patterns": ["**"], "budget": "25%"}
LAYERS: dict[str, Any] = {"include_patterns": ["model.layers.*"]}


def main() -> None:
    """Runs the benchmark, or one case of it."""
    parser = command_line("load", __doc__)
    parser.add_argument("--case", choices=CASES, help="run this one in this process and print what it found as JSON")
    parser.add_argument("--folder", type=Path, help="where the files of a case are")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    if args.case:
        with torch.no_grad():
            print(json.dumps(CASES[args.case](sizes, args.folder, 1 if args.quick else 4)))
        return
    output = Output("load", args.quick)
    folder = Path(tempfile.mkdtemp(prefix="load-", dir="/var/tmp"))
    try:
        write_files(sizes, folder)
        found = {case: in_process(case, args.quick, folder) for case in CASES}
    finally:
        shutil.rmtree(folder)
    judge(output, found)
    finish(output, args.out)


def write_files(sizes: dict[str, Any], folder: Path) -> None:
    """The checkpoints, by the names of their dtypes."""
    model: Any = build_llama(**sizes)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model.to(dtype).save_pretrained(folder / name, max_shard_size="500MB")
    (folder / "store").mkdir()
    os.sync()


def in_process(case: str, quick: bool, folder: Path) -> Found:
    """What one case found."""
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    command += ["--quick"] if quick else []
    # Of kernels that are alike, the first process to compile would pay for the others.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"kernels-{list(CASES).index(case)}")}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **caches})
    return json.loads(result.stdout.splitlines()[-1])


def judge(output: Output, found: dict[str, Found]) -> None:
    """The tables and the bounds."""
    columns = ("seconds", "plain", "read all", "first call")
    rows = []
    for case, numbers in found.items():
        row: dict[str, Any] = {"load": case, "peak MB": numbers["peak"][0] / 1e6}
        row["allowed MB"] = numbers["allowed"][0] / 1e6 if "allowed" in numbers else None
        rows.append(row | {f"{name} s": median(numbers[name]) if name in numbers else None for name in columns})
    output.table("medians", rows)
    converted = ("bfloat16 to float32", "float32 to bfloat16")
    for case in ("in place", *converted):
        ratio = found[case]["peak"][0] / found[case]["allowed"][0]
        output.check(Check(f"{case}: peak / (budget and largest weight)", ratio, 1.05))
    first = found["in place"]
    output.check(Check("in place: time / reading all files", paired(first["seconds"], first["read all"]), 1.2))
    for case in ("layers in place", *converted):
        ratio = paired(found[case]["seconds"], found[case]["plain"])
        output.check(Check(f"{case}: time / plain work on the same bytes", ratio, 1.2))
    ours, theirs = found["layers in place"], found["accelerate, layers on disk"]
    for what in ("seconds", "peak"):
        ratio = ours[what][0] / theirs[what][0]
        output.check(Check(f"layers in place: {what} / accelerate's", ratio, 1.0))


# --- the cases ---------------------------------------------------------------------------------------------------------


def loaded(
    sizes: dict[str, Any],
    folder: Path,
    rounds: int,
    files: str,
    dtype: torch.dtype,
    config: dict[str, Any],
    call: bool = False,
) -> Found:
    """Loads and the plain work on the same bytes, by turns the first; the peak is that of the first load of all."""
    config = {**config, "store_dir": folder / "store"}
    shards = sorted((folder / files).glob("*.safetensors"))
    copies = files != str(dtype).removeprefix("torch.")
    small = {**QUICK, "num_hidden_layers": 1, "vocab_size": 64}
    state = {name: value.half() for name, value in build_llama(**small).state_dict().items()}
    flextensor_fx.release(flextensor_fx.load(on_meta(small, torch.float32), state, {**CONFIG, "budget": "90%"}))
    found: Found = {"seconds": [], "plain": [], "read all": []}
    streamed: set[str] = set()
    written = 0

    def ours(model: Any) -> None:
        def work() -> None:
            flextensor_fx.load(model, folder / files, config, progress=False)

        found["seconds"].append(timed(work, shards))

    def plain() -> None:
        def work() -> None:
            kept = read(shards, None if copies else lambda name: name not in streamed)
            write(folder / "store" / "plain", written if copies else 0)
            del kept

        found["plain"].append(timed(work, shards))

    model = on_meta(sizes, dtype)
    numbers = measured(partial(ours, model))
    found["peak"] = [float(numbers["peak"] - numbers["before"])]
    report = flextensor_fx.report(model)
    streamed.update(flextensor_fx.offloading.find_sessions(model)[0].moved)
    written = sum(unit.streamed_bytes for unit in report.units)
    if report.budget is not None:
        found["allowed"] = [float(report.budget + max(parameter.nbytes for parameter in model.parameters()))]
    if call:
        compiled = torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True)
        found["first call"] = [first_call(compiled, sizes)]
        del compiled
        torch._dynamo.reset()
    del model
    for number in range(rounds):
        gc.collect()
        found["read all"].append(timed(lambda: read(shards, None), shards))
        if number:
            for work in (plain, lambda: ours(on_meta(sizes, dtype)))[:: -1 if number % 2 else 1]:
                work()
                gc.collect()
        else:
            plain()
    return found


def in_place(sizes: dict[str, Any], folder: Path, rounds: int) -> Found:
    """The files have the model's dtype."""
    return loaded(sizes, folder, rounds, "float32", torch.float32, CONFIG)


def widened(sizes: dict[str, Any], folder: Path, rounds: int) -> Found:
    """From bfloat16 to float32."""
    return loaded(sizes, folder, rounds, "bfloat16", torch.float32, CONFIG)


def narrowed(sizes: dict[str, Any], folder: Path, rounds: int) -> Found:
    """From float32 to bfloat16."""
    return loaded(sizes, folder, rounds, "float32", torch.bfloat16, CONFIG)


def layers_in_place(sizes: dict[str, Any], folder: Path, rounds: int) -> Found:
    """All layers streamed, the rest resident; and a call."""
    return loaded(sizes, folder, rounds, "float32", torch.float32, LAYERS, call=True)


def by_accelerate(sizes: dict[str, Any], folder: Path, rounds: int) -> Found:
    """The same, by hooks."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = build_llama(**sizes)
    shards = sorted((folder / "float32").glob("*.safetensors"))
    places: dict[str, Any] = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    places |= {f"model.layers.{n}": "disk" for n in range(sizes["num_hidden_layers"])}
    seconds: list[float] = []

    def work() -> None:
        load_checkpoint_and_dispatch(model, str(folder / "float32"), places, offload_folder=str(folder / "accelerate"))

    numbers = measured(lambda: seconds.append(timed(work, shards)))
    result: Found = {"seconds": seconds, "peak": [float(numbers["peak"] - numbers["before"])]}
    return {**result, "first call": [first_call(model, sizes)]}


def resident(sizes: dict[str, Any], folder: Path, rounds: int) -> Found:
    """Everything in memory, by `load_state_dict`; and a call through Inductor."""
    from accelerate import init_empty_weights
    from safetensors.torch import load_file

    with init_empty_weights():
        model = build_llama(**sizes)
    shards = sorted((folder / "float32").glob("*.safetensors"))
    seconds: list[float] = []

    def work() -> None:
        for shard in shards:
            values = {name: value.clone() for name, value in load_file(shard).items()}
            model.load_state_dict(values, strict=False, assign=True)

    numbers = measured(lambda: seconds.append(timed(work, shards)))
    result: Found = {"seconds": seconds, "peak": [float(numbers["peak"] - numbers["before"])]}
    return {**result, "first call": [first_call(torch.compile(model, fullgraph=True), sizes)]}


CASES: dict[str, Callable[[dict[str, Any], Path, int], Found]] = {
    "in place": in_place,
    "bfloat16 to float32": widened,
    "float32 to bfloat16": narrowed,
    "layers in place": layers_in_place,
    "accelerate, layers on disk": by_accelerate,
    "resident, load_state_dict": resident,
}


def on_meta(sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model without values."""
    with torch.device("meta"):
        model: Any = build_llama(**sizes)
        return model.to(dtype)


def first_call(call: Callable[..., Any], sizes: dict[str, Any]) -> float:
    """Seconds."""
    ids = torch.randint(sizes["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(1))
    begin = time.perf_counter()
    call(ids)
    return time.perf_counter() - begin


# --- plain reads and writes ----------------------------------------------------------------------------------------------


def timed(work: Callable[[], object], shards: Iterable[Path]) -> float:
    """Seconds, beginning with no page of the files in memory."""
    os.sync()
    for shard in shards:
        fd = os.open(shard, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def read(shards: Iterable[Path], wanted: Callable[[str], bool] | None) -> list[mmap.mmap]:
    """Reads whole files into one buffer, or wanted tensors into memory of their own, as it lies around them in the file."""
    buffer, kept = mmap.mmap(-1, PIECE), []
    for shard in shards:
        fd = os.open(shard, os.O_RDONLY | os.O_DIRECT)
        if wanted is None:
            size, done = os.fstat(fd).st_size, 0
            while done < size:
                done += os.preadv(fd, [buffer], done)
        else:
            table = os.open(shard, os.O_RDONLY)  # headers are not read in whole blocks
            names = {name: name for name in read_names(str(shard), table) if wanted(name)}
            for entry in read_entries(str(shard), table, names).values():
                begin = entry.offset // 4096 * 4096
                needed = entry.offset + entry.spec.nbytes - begin
                kept.append(mmap.mmap(-1, -(-needed // 4096) * 4096))
                view, done = memoryview(kept[-1]), 0
                while done < needed:
                    done += os.preadv(fd, [view[done : done + PIECE]], begin + done)
            os.close(table)
        os.close(fd)
    return kept


def write(path: Path, nbytes: int) -> None:
    """Writes so many bytes to a new file, in pieces."""
    if not nbytes:
        return
    data = memoryview(bytes(8 << 20))
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for done in range(0, nbytes, len(data)):
            file.write(data[: nbytes - done])
    path.unlink()


if __name__ == "__main__":
    main()
