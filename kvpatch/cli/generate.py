"""`kvpatch generate`: one prompt, one answer, and what it cost."""

import json
from typing import Annotated

import typer

from kvpatch.cli import _shared
from kvpatch.cli._shared import BudgetText, Dtype, Model, PolicyName, Threads


def generate(
    model: Model = "demo",
    prompt: Annotated[str | None, typer.Option(help="The prompt's text.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help='File with the prompt; "-" is standard input.')] = None,
    policy: PolicyName = "inertia-lazy",
    budget: BudgetText = "10%",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.", min=1)] = 256,
    chat_template: Annotated[
        bool, typer.Option("--chat/--raw", help="Put the prompt as a user's turn, where the tokenizer has a template.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of sampling.", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens that sampling draws from; 0: all.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    compile: Annotated[bool, typer.Option(help="Compile the decode step.")] = True,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer a prompt with a cache of fixed size.

    The answer goes to standard output as it comes; progress and the cost go to standard error.

    [bold]Examples[/]:

    kvpatch generate --prompt "Name three rivers." --budget full

    kvpatch generate --prompt-file report.txt --budget 10% --max-new-tokens 400

    cat report.txt | kvpatch generate --prompt-file - --policy score-free --budget 512 --json
    """
    text, limit = _shared.read_text(prompt, prompt_file), _shared.budget_of(budget, policy)
    console = _shared.notes()
    with _shared.told():
        with console.status("loading the model"):
            loaded, tokenizer = _shared.load(model, dtype, threads)
            import torch

            import kvpatch
            from kvpatch.cli._answer import Cost, Streamed

            handle = kvpatch.patch(loaded, policy, compile=compile, **limit)
        if chat_template and getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            inputs = tokenizer(text, return_tensors="pt")
        ids = inputs["input_ids"].to(loaded.device)
        if seed is not None:
            torch.manual_seed(seed)
        sampling = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        with _shared.Reading(loaded, ids.shape[1], console) as begin:
            streamed = Streamed(tokenizer, begin, echo=not as_json)
            output = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=_shared.pad_of(tokenizer),
                streamer=streamed,
                **sampling,
            )
        cost = Cost.of(handle, streamed, ids.shape[1], output.shape[1], 0.0)
    if as_json:
        settings = {"model": model, "policy": policy, "budget": str(handle.budget), "text": streamed.text}
        typer.echo(json.dumps(settings | cost.to_dict()))
    else:
        console.print(str(cost), highlight=False, style="dim")
