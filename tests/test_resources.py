"""What the compiler makes of the kernels, without a GPU: no spills at head size 128, keys and values 16 bytes wide.

The tests' process runs kernels in the interpreter, where nothing can be compiled: another process does it.
"""

import csv
import os
import subprocess
import sys

import pytest

from kvpatch.profiling import resources


def compiled(out, *options: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvpatch.profiling.resources", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(out.open()))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    return compiled(folder / "bf16.csv", "--shape", "4x128", "--dtype", "bfloat16") + compiled(
        folder / "fp32.csv", "--shape", "7x128", "--dtype", "float32", "--architecture", "90"
    )


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(rows):
    for architecture in ("80", "90", "100"):
        found = {row["kernel"] for row in rows if row["architecture"] == architecture}
        assert found == {"attend", "settle", "apply", "pooled", "window_lse", "admit", "choose"}


def test_no_kernel_spills_at_head_size_128(rows):
    assert [row for row in rows if int(row["spills"]) or int(row["stack"])] == []


def test_keys_and_values_are_loaded_16_bytes_at_a_time(rows):
    for row in rows:
        if row["kernel"] in ("attend", "pooled", "window_lse"):
            widths = dict(map(int, pair.split(":")) for pair in row["loads"].split())
            narrow = sum(count for width, count in widths.items() if width < 16)
            # What is narrower is one number a row or head: lengths, slots, log-sum-exps, and one vector of new values.
            # The smallest tile of keys alone would take 8 loads of 4 bytes a thread.
            assert widths[16] > narrow and narrow < 8, row


def test_two_programs_of_the_main_kernel_fit_a_multiprocessor(rows):
    for row in rows:
        if row["kernel"] == "attend" and row["architecture"] != "80":
            warps = 8 if row["dtype"] == "float32" else 4
            assert 2 * int(row["shared"]) <= 227 * 1024
            assert 2 * int(row["registers"]) * 32 * warps <= 65536, row


def test_the_width_of_a_load_is_read_from_the_disassembly():
    code = """
        /*0100*/  LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0110*/  LDGSTS.E.BYPASS.128 [R1], [R2.64], P0 ;
        /*0120*/  LDG.E.U16 R5, [R2.64] ;
        /*0130*/  LDG.E R6, [R2.64] ;
        /*0140*/  LDG.E.64 R6, [R2.64] ;
        /*0150*/  LDG.E.U8 R6, [R2.64] ;
        /*0160*/  STG.E.128 [R2.64], R4 ;
    """
    assert resources.load_widths(code) == {1: 1, 2: 1, 4: 1, 8: 1, 16: 2}


def test_in_the_interpreter_nothing_is_said_to_be_compiled():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), resources.recorded():
        pass
