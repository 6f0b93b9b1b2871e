"""Is a model that is streamed to a GPU right to the bit, and as fast as the link allows?

One command on a machine with a GPU and torch, which ends within 6 minutes:

    python benchmarks/gpu_check.py

First the numbers that must be right: Llama-, DiT- and MoE-shaped models in bfloat16, with and without CUDA graphs, at several
budgets, on streams of the user's, with weights that are written between calls, offloaded from the CPU, and in training. The
first that is wrong ends the run with status 1 and a line that says what, where, what was expected and what was found.

Then those that must be good: times, memory, and how much of the link's bandwidth is used; see gpu_numbers.py. Without a GPU
everything runs in a small form that shows that it works, with disk or host memory in the place of the link.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

# Read when the first product is computed: without it cuBLAS refuses to be deterministic, which training asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent.parent))  # for a bare checkout

import gpu_correctness
import gpu_numbers
import torch
from _common import Output, command_line, machine
from gpu_setting import Clock, Setting, WrongNumber

PARTS = ("correctness", "numbers")
SECONDS = 320.0
GRACE = 30.0  # for what is under way when the time is over
SHARE = 0.6  # of the time, that correctness may take where numbers are to follow


def main() -> None:
    """Runs the check and ends the process: with 1 where a number is wrong, a bound is missed or bits are unchecked."""
    parser = command_line("gpu_check", __doc__)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds until things are left out (%(default)s)")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first wrong number")
    args = parser.parse_args()
    clock = Clock(args.limit)
    # Where something hangs, this says where.
    faulthandler.dump_traceback_later(args.limit + GRACE, exit=True, file=2)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are so small that threads only wait for one another
    output = Output("gpu_check", args.quick, {**machine(), **described(device)})
    # A C++ compiler would take minutes for what is checked here.
    inner = "aot_eager" if device.type == "cpu" else "inductor"
    setting = Setting(device, inner, args.quick, args.keep_going, clock, output, args.out)
    try:
        if args.part != "numbers":
            gpu_correctness.check(setting, 1.0 if args.part else SHARE)
        if args.part != "correctness":
            gpu_numbers.measure(setting)
    except WrongNumber as error:
        print(f"\n{error}", flush=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
    sys.exit(finish(setting))


def described(device: torch.device) -> dict[str, str]:
    """The GPU, for the record."""
    if device.type == "cpu":
        return {"device": "cpu"}
    found = torch.cuda.get_device_properties(device)
    return {"device": f"{found.name}, {found.total_memory / 2**30:.0f} GiB", "cuda": str(torch.version.cuda)}


def finish(setting: Setting) -> int:
    """Says what became of it; the exit status."""
    output, judged = setting.output, setting.on_gpu and not setting.quick
    for what in setting.skipped:
        print(f"skipped  {what}: no time left")
    for name in ("skipped", "wrong"):
        output.rows += [{"table": name, "what": what} for what in getattr(setting, name)]
    if setting.wrong:
        output.save(setting.out)
        print(f"\n{len(setting.wrong)} wrong; written to {setting.out} after {setting.clock.elapsed:.0f} s")
        return 1
    status = output.write(setting.out)
    unchecked = any(what.startswith("bits") for what in setting.skipped)
    if not judged:
        print("the bounds are for a whole run on a GPU, and are not judged here")
    how_much = "not all was checked" if setting.skipped else "all that was asked for was checked"
    print(f"{how_much}; {setting.clock.elapsed:.0f} s")
    return int(unchecked or (judged and status != 0))


if __name__ == "__main__":
    main()
