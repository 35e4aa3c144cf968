"""What the Triton kernels take on a GPU, read from the compiler's output: no GPU is needed.

The operators are run on small CPU tensors with their launches intercepted, so that what is compiled is what a launch
on a GPU would compile: the same types, alignments and constants. Registers, shared memory and spills come from the
cubin, the width of loads from its disassembly.

    python -m kvpatch.profiling.resources --out profiles/kernels.csv
"""

import contextlib
import csv
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import triton
import typer
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpatch.attention import kernels
from kvpatch.attention import triton as launched

# Lists, because typer takes them as defaults.
ARCHITECTURES = [80, 90, 100]
SHAPES = ["1x64", "3x64", "4x128", "7x128", "8x256"]
DTYPES = ["bfloat16", "float32"]
COLUMNS = (
    *("triton", "architecture", "dtype", "queries", "head_size", "kernel", "does"),
    *("registers", "shared", "spills", "stack", "loads_16", "loads"),
)
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    """One launch of a kernel: its name, arguments by name, and options such as num_warps."""

    kernel: str
    arguments: dict
    options: dict


class Resources(NamedTuple):
    """What one compiled kernel takes.

    registers: a thread.   shared: bytes a program.   spills: local-memory loads and stores in the code.
    stack: bytes a thread.   loads: loads from global memory by width in bytes, asynchronous copies included.
    """

    kernel: str
    architecture: int
    registers: int
    shared: int
    spills: int
    stack: int
    loads: dict[int, int]


class _Recorder:
    def __init__(self, function, launches: list[Launch]):
        self.function, self.launches = function, launches

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
            given = dict(zip(self.function.arg_names, arguments, strict=False))
            self.launches.append(Launch(self.function.__name__, {**given, **named}, options))

        return launch


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launch no kernel inside a with block; what would have been launched is in the list.

    Raises:
        RuntimeError: in Triton's interpreter, where nothing can be compiled.
    """
    if launched.interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: kernels can't be compiled; unset it")
    launches: list[Launch] = []
    names = [name for name, value in vars(kernels).items() if isinstance(value, triton.runtime.JITFunction)]
    before = {name: getattr(kernels, name) for name in names}
    try:
        for name, function in before.items():
            setattr(kernels, name, _Recorder(function, launches))
        yield launches
    finally:
        for name, function in before.items():
            setattr(kernels, name, function)


def compiled(launch: Launch, architecture: int):
    """The kernel of a launch compiled for a compute capability such as 90."""
    function = getattr(kernels, launch.kernel)
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        value, name = launch.arguments[parameter.name], parameter.name
        if parameter.is_constexpr or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)


def resources(launch: Launch, architecture: int) -> Resources:
    """Compile a launch and read what it takes."""
    kernel = compiled(launch, architecture)
    usage = _cuobjdump(kernel.asm["cubin"], "--dump-resource-usage")
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    code = _cuobjdump(kernel.asm["cubin"], "--dump-sass")
    spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    # Shared memory is given at the launch: the cubin knows only what is fixed.
    return Resources(
        launch.kernel, architecture, found["REG"], kernel.metadata.shared, spills, found["STACK"], load_widths(code)
    )


def rows_of(queries: int, width: int, dtype: torch.dtype, architecture: int) -> Iterator[dict]:
    """One row of `COLUMNS` per kernel and variant of one shape."""
    seen = set()
    for launch in launches_of(queries, width, dtype):
        names = ("SCORES", "VNORM", "SCORER", "APPLIES", "BLOCK_M")
        does = " ".join(f"{name}={launch.arguments[name]}" for name in names if name in launch.arguments)
        if (launch.kernel, does) in seen:
            continue
        seen.add((launch.kernel, does))
        found = resources(launch, architecture)
        yield dict(
            zip(
                COLUMNS,
                (triton.__version__, architecture, str(dtype).removeprefix("torch."), queries, width, launch.kernel)
                + (does, found.registers, found.shared, found.spills, found.stack, found.loads.get(16, 0))
                + (" ".join(f"{width}:{count}" for width, count in found.loads.items()),),
                strict=True,
            )
        )


def record(
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    shape: Annotated[list[str], typer.Option(help="Queries a group x head size.")] = SHAPES,
    dtype: Annotated[list[str], typer.Option(help="float16, bfloat16 or float32.")] = DTYPES,
    architecture: Annotated[list[int], typer.Option(help="Compute capabilities.")] = ARCHITECTURES,
) -> None:
    """Compile every kernel and say what it takes."""
    table = Table(*COLUMNS[1:])
    rows = []
    for text in shape:
        queries, width = map(int, text.split("x"))
        for name in dtype:
            for target in architecture:
                for row in rows_of(queries, width, getattr(torch, name), target):
                    rows.append(row)
                    table.add_row(*map(str, list(row.values())[1:]))
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    Console().print(table)


def load_widths(code: str) -> dict[int, int]:
    """Loads from global memory in a disassembly, by bytes a thread."""
    widths: Counter[int] = Counter()
    for line in code.splitlines():
        found = re.search(r"\b(LDG|LDGSTS)\.([A-Z0-9_.]*)", line)
        if found:
            bits = re.search(r"(?:^|\.)(?:U|S)?(8|16|64|128|256)(?:$|\.)", f".{found.group(2)}.")
            widths[int(bits.group(1)) // 8 if bits else 4] += 1
    return dict(sorted(widths.items()))


def _cuobjdump(binary: bytes, option: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


def launches_of(queries: int, width: int, dtype: torch.dtype, *, batch: int = 2, groups: int = 2, slots: int = 2048):
    """Every kernel's launch for one shape, once per step kind, scorer and pool that changes the code: list[Launch]."""
    heads = groups * queries

    def normal(*shape):
        return torch.empty(*shape, dtype=dtype)

    q, k, v = normal(batch, heads, 1, width), normal(batch, groups, 1, width), normal(batch, groups, 1, width)
    keys, values = normal(batch, groups, slots, width), normal(batch, groups, slots, width)
    utility = torch.empty(1, batch, 1, slots)
    positions = torch.empty(batch, 1, slots, dtype=torch.int64)
    free = length = torch.empty(batch, 1, dtype=torch.int64)
    newest, active = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.bool)
    common = (keys, values, utility, positions, free, length, newest, active, slots, 1.0, 0)
    with recorded() as launches:
        for scorer in ("", *launched.SCORERS):
            launched.attend(q, k, v, *common, scorer, "mean", "ema", 0.8)
        lse = torch.empty(batch, heads, 1)
        launched.pooled(q, keys, lse, length, active, utility, slots, 1.0, "mean", "ema", 0.8)
        launched.window_scores(normal(batch, heads, 32, width), keys, length[:, 0], None, 1.0, True, "mean")
        ledger = (positions[None], free[None], length[None], newest, active)
        launched.admit(utility[None], *ledger, True, True)
        rows = [newest] * 5
        launched.choose(utility[None], utility[None], *ledger, rows, True, True, 1, "ema", 0.8, 1e-6, 0)
    return launches


if __name__ == "__main__":
    typer.run(record)
