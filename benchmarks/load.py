"""How long does loading a model take that never fits in memory, and how much memory?

A Llama of 2 GB on the meta device is loaded from sharded safetensors files whose pages are not in memory, at a budget of 25%.
Every load is a process of its own, which has loaded a small model before; each is followed, or preceded, by plain reads.

1. Peak resident set over what the process had, in shares of the budget and the largest weight together: at most 1.05.
2. In place (the files' dtype is the model's): time against one thread that reads all files into one buffer, in pieces of 64 MB
   past the page cache: at most 1.2. With the layers alone selected, time against such a thread that reads what stays resident,
   which is all that the load reads, into memory of its own: at most 1.2.
3. Converted (the files are bfloat16, or the model is): time against reading all bytes of the files so, and then writing as many
   as the store gets to a file, as a program does that reads and then writes: at most 1.2.
4. Time and memory against those of accelerate's `load_checkpoint_and_dispatch` with all layers on disk, from the same files.
5. Time until the first call of the compiled model has an answer, beside that of a model that is resident.
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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import Check, Output, build_llama, command_line, finish
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
CONFIG: dict[str, Any] = {"include_patterns": ["**"], "budget": "25%"}
LAYERS: dict[str, Any] = {"include_patterns": ["model.layers.*"]}


def main() -> None:
    """Runs the benchmark, or one case of it."""
    parser = command_line("load", __doc__)
    parser.add_argument("--case", choices=CASES, help="run this one in this process and print what it found as JSON")
    parser.add_argument("--folder", type=Path, help="where the files of a case are")
    parser.add_argument("--number", type=int, default=0, help="of the round")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    if args.case:
        with torch.no_grad():
            print(json.dumps(CASES[args.case](sizes, args.folder, args.number)), flush=True)
        return
    output = Output("load", args.quick)
    folder = Path(tempfile.mkdtemp(prefix="load-", dir="/var/tmp"))
    try:
        write_files(sizes, folder)
        found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for number in range(1 if args.quick else 3):
            for case in CASES:
                if number == 0 or case in ROUNDS:
                    found[case].append(in_process(case, args.quick, folder, number))
    finally:
        shutil.rmtree(folder)
    judge(output, found)
    finish(output, args.out)


def write_files(sizes: dict[str, Any], folder: Path) -> None:
    """The checkpoints, by the names of their dtypes."""
    model = build_llama(**sizes)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model.to(dtype).save_pretrained(folder / name, max_shard_size="500MB")
    (folder / "store").mkdir()
    os.sync()


def in_process(case: str, quick: bool, folder: Path, number: int) -> dict[str, float]:
    """What one case found."""
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), "--number", str(number)]
    command += ["--quick"] if quick else []
    # Of kernels that are alike, the first process to compile would pay for the others.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"kernels-{list(CASES).index(case)}")}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **caches})
    return json.loads(result.stdout.splitlines()[-1])


def judge(output: Output, found: dict[str, list[dict[str, float]]]) -> None:
    """The tables and the bounds."""

    def middle(case: str, *names: str) -> float:
        values = [[run[name] for name in names] for run in found[case]]
        return median(a / b for a, b in values) if len(names) == 2 else median(a for (a,) in values)

    rows = []
    for case, runs in found.items():
        row: dict[str, Any] = {"load": case, "s": middle(case, "seconds"), "peak MB": middle(case, "peak") / 1e6}
        row["allowed MB"] = middle(case, "allowed") / 1e6 if "allowed" in runs[0] else None
        row["plain s"] = middle(case, "plain") if "plain" in runs[0] else None
        row["read all s"] = middle(case, "read all")
        row["first call s"] = runs[0].get("first call")
        rows.append(row)
    output.table("medians of paired runs", rows)
    for case in ("in place", "bfloat16 to float32", "float32 to bfloat16"):
        output.check(Check(f"{case}: peak / (budget and largest weight)", middle(case, "peak", "allowed"), 1.05))
    output.check(Check("in place: time / reading all files", middle("in place", "seconds", "read all"), 1.2))
    for case in ("layers in place", "bfloat16 to float32", "float32 to bfloat16"):
        output.check(Check(f"{case}: time / plain work on the same bytes", middle(case, "seconds", "plain"), 1.2))
    theirs = found["accelerate, layers on disk"][0]
    for what in ("seconds", "peak"):
        ratio = middle("layers in place", what) / theirs[what]
        output.check(Check(f"layers in place: {what} / accelerate's", ratio, 1.0))


# --- the cases ---------------------------------------------------------------------------------------------------------


def loaded(
    sizes: dict[str, Any],
    folder: Path,
    number: int,
    files: str,
    dtype: torch.dtype,
    config: dict[str, Any],
    call: bool = False,
) -> dict[str, float]:
    """One load, and the plain work on the same bytes, by turns the first."""
    config = {**config, "store_dir": folder / "store"}
    shards = sorted((folder / files).glob("*.safetensors"))
    small = {**QUICK, "num_hidden_layers": 1, "vocab_size": 64}
    state = {name: value.half() for name, value in build_llama(**small).state_dict().items()}
    flextensor_fx.release(flextensor_fx.load(on_meta(small, torch.float32), state, {**CONFIG, "budget": "90%"}))

    def ours() -> dict[str, float]:
        model, seconds = on_meta(sizes, dtype), []
        numbers = measured(lambda: seconds.append(timed(lambda: load(model, folder / files, config), shards)))
        result = {"seconds": seconds[0], "peak": float(numbers["peak"] - numbers["before"])}
        report = flextensor_fx.report(model)
        if report.budget is not None:
            result["allowed"] = float(report.budget + max(parameter.nbytes for parameter in model.parameters()))
        if call:
            result["first call"] = first_call(
                torch.compile(model, backend=flextensor_fx.flextensor, fullgraph=True), sizes
            )
        streamed.extend(flextensor_fx.offloading.find_sessions(model)[0].moved)
        written.append(sum(unit.streamed_bytes for unit in report.units))
        return result

    def plain() -> dict[str, float]:
        gc.collect()
        copies = files != str(dtype).removeprefix("torch.")
        wanted = None if copies else lambda name: name not in streamed

        def work() -> None:
            kept = read(shards, wanted)
            write(folder / "store" / "plain", written[0] if copies else 0)
            del kept

        return {"plain": timed(work, shards)}

    streamed: list[str] = []
    written: list[int] = []
    begin = {"read all": timed(lambda: read(shards, None), shards)} if number % 2 else {}
    found = {**ours(), **plain()}
    return {**found, **(begin or {"read all": timed(lambda: read(shards, None), shards)})}


def load(model: Any, files: Path, config: dict[str, Any]) -> None:
    """Ours."""
    flextensor_fx.load(model, files, config, progress=False)


def in_place(sizes: dict[str, Any], folder: Path, number: int) -> dict[str, float]:
    """The files have the model's dtype."""
    return loaded(sizes, folder, number, "float32", torch.float32, CONFIG)


def widened(sizes: dict[str, Any], folder: Path, number: int) -> dict[str, float]:
    """From bfloat16 to float32."""
    return loaded(sizes, folder, number, "bfloat16", torch.float32, CONFIG)


def narrowed(sizes: dict[str, Any], folder: Path, number: int) -> dict[str, float]:
    """From float32 to bfloat16."""
    return loaded(sizes, folder, number, "float32", torch.bfloat16, CONFIG)


def layers_in_place(sizes: dict[str, Any], folder: Path, number: int) -> dict[str, float]:
    """All layers streamed, the rest resident; and a call."""
    return loaded(sizes, folder, number, "float32", torch.float32, LAYERS, call=number == 0)


def by_accelerate(sizes: dict[str, Any], folder: Path, number: int) -> dict[str, float]:
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
    result = {"seconds": seconds[0], "peak": float(numbers["peak"] - numbers["before"])}
    result["first call"] = first_call(model, sizes)
    return {**result, "read all": timed(lambda: read(shards, None), shards)}


def resident(sizes: dict[str, Any], folder: Path, number: int) -> dict[str, float]:
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
    result = {"seconds": seconds[0], "peak": float(numbers["peak"] - numbers["before"])}
    result["first call"] = first_call(torch.compile(model, fullgraph=True), sizes)
    return {**result, "read all": timed(lambda: read(shards, None), shards)}


CASES: dict[str, Callable[[dict[str, Any], Path, int], dict[str, float]]] = {
    "in place": in_place,
    "bfloat16 to float32": widened,
    "float32 to bfloat16": narrowed,
    "layers in place": layers_in_place,
    "accelerate, layers on disk": by_accelerate,
    "resident, load_state_dict": resident,
}
ROUNDS = ("in place", "bfloat16 to float32", "float32 to bfloat16", "layers in place")


def on_meta(sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model without values."""
    with torch.device("meta"):
        return build_llama(**sizes).to(dtype)


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
