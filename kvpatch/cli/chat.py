"""`kvpatch chat`: a conversation over one cache of fixed size."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kvpatch.cli import _shared
from kvpatch.cli._shared import BudgetText, Dtype, Model, PolicyName, Threads

MARK = "\u241e"  # a symbol for a record's end, which no one types
HELP = "/reset forgets the conversation, /stats says what the last answer cost, /quit (or Ctrl-D) ends."


class Conversation:
    """Token ids of a conversation, as the model has read and written them.

    Args:
        tokenizer: with a chat template.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.ids = tokenizer, []

    def ask(self, text: str) -> list[int]:
        """Add a user's turn; the whole conversation's ids."""
        render, tokenizer = self.tokenizer.apply_chat_template, self.tokenizer
        turn = {"role": "user", "content": text}
        options = {"tokenize": False, "add_generation_prompt": True}
        if not self.ids:
            added = render([turn], **options)
        else:
            # What the template puts behind an answer and around the next question.
            before = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
            added = render([*before, turn], **options).split(MARK, 2)[2]
        ids = tokenizer(added, add_special_tokens=False).input_ids
        if self.ids and self.ids[-1] == ids[0] == tokenizer.eos_token_id:
            ids = ids[1:]  # the answer ended with it already
        self.ids += ids
        return self.ids


def _questions(console) -> Iterator[str]:
    """Lines that the user types, or those of a file or pipe."""
    while True:
        if sys.stdin.isatty():
            try:
                line = console.input("[bold]you[/] ")
            except EOFError:
                return
        else:
            data = sys.stdin.buffer.readline()
            if not data:
                return
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"standard input is not UTF-8 text ({error})") from error
        if line.strip():
            yield line.strip()


def chat(
    model: Model = "demo",
    policy: PolicyName = "inertia-lazy",
    budget: BudgetText = "1024",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0.0)] = 0.0,
    compile: Annotated[bool, typer.Option(help="Compile the decode step.")] = True,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Talk with a model whose cache never grows beyond the budget.

    A later turn attends to what was kept of the earlier ones and to itself; then the cache is cut to the budget
    again. A share ("10%") is of all tokens so far.

    [bold]Examples[/]:

    kvpatch chat --budget 512

    printf 'Name a river.\\nWhere does it end?\\n' | kvpatch chat --max-new-tokens 40
    """
    limit = _shared.budget_of(budget, policy)
    console = _shared.notes()
    with _shared.told():
        with console.status("loading the model"):
            loaded, tokenizer = _shared.load(model, dtype, threads)
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError(f"model {model!r} has no chat template: use `kvpatch generate --raw`")
            import torch

            import kvpatch
            from kvpatch.cli._answer import Cost, Streamed

            handle = kvpatch.patch(loaded, policy, compile=compile, **limit)
        cache, conversation, cost = kvpatch.SlotCache(loaded.config, policy, **limit), Conversation(tokenizer), None
        console.print(f"{handle!r}. {HELP}", style="dim", highlight=False)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        for question in _questions(console):
            if question == "/quit":
                break
            if question == "/stats":
                console.print(str(cost or "nothing was answered yet"), style="dim", highlight=False)
                continue
            if question == "/reset":
                cache.free()
                conversation = Conversation(tokenizer)
                console.print("forgotten", style="dim")
                continue
            ids = torch.tensor([conversation.ask(question)], device=loaded.device)
            new, compiled = ids.shape[1] - cache.columns, handle.stats.compile_seconds
            with _shared.Reading(loaded, new, console) as begin:
                streamed = Streamed(tokenizer, begin, echo=True)
                output = loaded.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_new_tokens,
                    pad_token_id=_shared.pad_of(tokenizer),
                    streamer=streamed,
                    **sampling,
                    **{handle.keyword: cache},
                )
            conversation.ids = output[0].tolist()
            cost = Cost.of(handle, streamed, new, output.shape[1], compiled)
