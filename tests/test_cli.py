"""The command line as a person meets it."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from kvpatch import cli, demo
from kvpatch.cli import demo as demo_command


def invoke(*arguments: str, **more):
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160"}, **more)


def test_the_demo_shows_each_way_beside_the_unpatched_model(monkeypatch):
    monkeypatch.setattr(demo_command, "OPERATING_POINTS", ("full", "inertia-lazy"))
    result = invoke("demo", "--length", "400", "--new-tokens", "24", "--budget", "0.2")
    assert result.exit_code == 0, result.output
    rows = {line.split("│")[1].strip(): line.split("│") for line in result.output.splitlines() if line.count("│") > 5}
    assert {"generate, unpatched", "full", "inertia-lazy"} <= set(rows)
    answer = re.search(r"Right answer: (\d{7})", result.output)[1]
    for name in ("generate, unpatched", "full"):
        assert answer in rows[name][2] and rows[name][3].strip() == "yes"
    held = {name: float(row[6]) for name, row in rows.items() if name in ("full", "inertia-lazy")}
    assert held["inertia-lazy"] < 0.5 * held["full"]


def test_a_budget_that_is_no_share_is_refused_by_name():
    result = invoke("demo", "--budget", "1.5")
    assert result.exit_code == 2
    assert "--budget" in result.output and "1.5" in result.output


def test_help_lists_the_commands_and_each_has_an_example():
    listed = invoke("--help")
    assert listed.exit_code == 0
    for name in ("demo", "generate", "chat", "list", "explain", "doctor", "bench"):
        assert re.search(rf"\b{name}\b", listed.output)
        shown = invoke(name, "--help")
        assert shown.exit_code == 0 and f"kvpatch {name}" in re.sub(r"Usage:.*", "", shown.output)


@pytest.fixture(scope="module")
def unpatched():
    """What the unpatched demo model answers."""
    model, tokenizer = demo.load()
    chat = [{"role": "user", "content": "Name three colours, please."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    columns = inputs["input_ids"].shape[1]
    return tokenizer.decode(output[0, columns:], skip_special_tokens=True), columns, output.shape[1] - columns


def test_generate_says_what_the_model_says_and_what_it_cost(unpatched):
    text, prompt, tokens = unpatched
    question = ("generate", "--prompt", "Name three colours, please.", "--no-compile", "--max-new-tokens", "16")
    shown = invoke(*question, "--budget", "full")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == text.rstrip("\n") + "\n"
    assert "\n\n" not in shown.stderr
    assert "prefill" in shown.stderr and "decode" in shown.stderr and "evicted" in shown.stderr
    assert json.loads(invoke(*question, "--policy", "full", "--json").stdout)["budget"] == "full"
    cost = json.loads(invoke(*question, "--budget", "20", "--json").stdout)
    assert cost["prompt_tokens"] == prompt
    assert cost["held"] == 20 and cost["evicted"] == prompt + cost["new_tokens"] - 1 - 20
    # 30 layers of keys and values, 3 heads of 64 floats
    assert cost["full_cache_bytes"] == (prompt + cost["new_tokens"] - 1) * 30 * 2 * 3 * 64 * 4
    assert cost["prefill_tokens_per_second"] == pytest.approx(prompt / cost["prefill_seconds"])


def test_generate_reads_files_and_standard_input(unpatched, tmp_path):
    (tmp_path / "prompt.txt").write_text("Name three colours, please.")
    more = ("--no-compile", "--max-new-tokens", "16", "--budget", "full")
    from_file = invoke("generate", "--prompt-file", str(tmp_path / "prompt.txt"), *more)
    from_input = invoke("generate", "--prompt-file", "-", *more, input="Name three colours, please.")
    assert from_file.stdout.strip() == from_input.stdout.strip() == unpatched[0].strip()


def test_generate_takes_a_folder_and_raw_text_and_samples_by_seed():
    more = ("generate", "--model", str(demo.path()), "--raw", "--prompt", "The sea was", "--max-new-tokens", "8")
    sampled = [
        invoke(*more, "--no-compile", "--temperature", "0.8", "--top-k", "20", "--seed", seed).stdout
        for seed in ("3", "3", "4")
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("generate",), "--prompt"),
        (("generate", "--prompt", "a", "--prompt-file", "b"), "--prompt"),
        (("generate", "--prompt", " "), "empty"),
        (("generate", "--prompt-file", "/nowhere/at/all"), "/nowhere/at/all"),
        (("generate", "--prompt", "a", "--budget", "much"), "much"),
        (("generate", "--prompt", "a", "--budget", "120%"), "120%"),
        (("generate", "--prompt", "a", "--dtype", "int3"), "int3"),
        (("bench", "--batches", "0"), "--batches"),
        (("bench", "--baselines", "vllm"), "vllm"),
        (("bench", "--peer", "nobody"), "nobody"),
        (("bench", "--policies", "", "--baselines", "none"), "--policies"),
        (("generate", "--prompt-file", "LATIN"), "UTF-8"),
        (("bench", "--out", "COLUMNS"), "other columns"),
    ],
    ids=str,
)
def test_bad_usage_is_named_with_exit_code_2(arguments, named, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Zürich, wo".encode("latin-1"))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    files = {"LATIN": str(latin), "COLUMNS": str(tmp_path / "other.csv")}
    result = invoke(*(files.get(word, word) for word in arguments))
    assert result.exit_code == 2
    assert named in re.sub(r"\s*│\s*\n│\s*", "", result.output)


def test_errors_of_the_library_are_one_line_with_exit_code_1(tmp_path):
    unknown = invoke("generate", "--prompt", "a", "--policy", "inertia-lasy")
    assert unknown.exit_code == 1 and "did you mean 'inertia-lazy'" in unknown.stderr
    assert "Traceback" not in unknown.output
    for folder in (tmp_path, tmp_path / "[bold]old[/bold] model"):  # no markup of the terminal's
        folder.mkdir(exist_ok=True, parents=True)
        nothing = invoke("generate", "--model", str(folder), "--prompt", "a")
        assert nothing.exit_code == 1 and str(folder) in nothing.stderr.replace("\n", "")


def test_chat_remembers_and_equals_one_conversation_read_at_once():
    lines = "My name is Ada.\n/stats\nWhat is my name?\n/reset\nWhat is my name?\n/quit\n"
    arguments = ("--no-compile", "--budget", "full", "--max-new-tokens", "24")
    shown = invoke("chat", *arguments, input=lines)
    assert shown.exit_code == 0, shown.output
    model, tokenizer = demo.load()
    turns = [{"role": "user", "content": "My name is Ada."}]
    expected = []
    for question in ("What is my name?", None):
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        expected.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        turns += [{"role": "assistant", "content": expected[-1]}, {"role": "user", "content": question}]
    for answer in expected:
        assert answer.strip() in shown.stdout
    assert "decode" in shown.stderr and "forgotten" in shown.stderr
    # Behind /reset the same question is the first one.
    alone = tokenizer.apply_chat_template(turns[2:3], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**alone, max_new_tokens=24, do_sample=False)
    fresh = tokenizer.decode(output[0, alone["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert shown.stdout.count("\n") >= 3  # answers stand apart
    assert fresh != expected[1].strip() and shown.stdout.split(expected[1].strip())[1].strip() == fresh


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
def test_a_conversations_ids_are_those_of_the_template(ended):
    from kvpatch.cli.chat import Conversation

    _, tokenizer = demo.load()
    conversation = Conversation(tokenizer)
    conversation.ask("A question?")
    conversation.ids += tokenizer("An answer.", add_special_tokens=False).input_ids
    conversation.ids += [tokenizer.eos_token_id] * ended
    turns = [("user", "A question?"), ("assistant", "An answer."), ("user", "Another one?")]
    chat = [{"role": role, "content": text} for role, text in turns]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert conversation.ask("Another one?") == expected


def test_chat_stays_within_its_budget():
    lines = "Tell me about rivers.\nAnd about lakes.\n/stats\n"
    shown = invoke("chat", "--no-compile", "--budget", "40", "--max-new-tokens", "20", input=lines)
    assert shown.exit_code == 0, shown.output
    assert "40 tokens held" in shown.stderr


def test_list_names_every_policy():
    import kvpatch

    listed = json.loads(invoke("list", "--json").stdout)
    assert [row["policy"] for row in listed["policies"]] == kvpatch.list_policies()
    assert {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"} <= set(listed["architectures"])
    assert "inertia-lazy" in invoke("list").stdout


def test_explain_says_the_paths():
    shown = invoke("explain", "--policy", "h2o-decode", "--budget", "512")
    assert shown.exit_code == 0 and "h2o-decode" in shown.stdout and "512 tokens" in shown.stdout
    assert json.loads(invoke("explain", "--budget", "512", "--json").stdout)["budget"] == "512 tokens"


def test_doctor_tests_itself(monkeypatch):
    fine = invoke("doctor")
    assert fine.exit_code == 0 and "self-test passed" in fine.stdout
    assert "torch" in fine.stdout and "back end packed" in fine.stdout
    assert "kvpatch[flash]" in fine.stdout
    from kvpatch import decoder

    original = decoder.Decoder.step
    monkeypatch.setattr(decoder.Decoder, "step", lambda *args, **more: original(*args, **more).neg())
    broken = invoke("doctor")
    assert broken.exit_code == 1 and "self-test failed" in broken.stdout


@pytest.mark.parametrize("seconds", [0.3, 4.0, 9.0], ids=["starting", "loading", "running"])
def test_ctrl_c_ends_with_exit_code_130_and_no_traceback(seconds):
    code = "from kvpatch.cli import main; print('begun', flush=True); main()"
    command = [sys.executable, "-c", code, "generate", "--prompt", "Count to 900."]
    with subprocess.Popen(
        [*command, "--max-new-tokens", "4000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"  # Python itself has started, however busy the machine is
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.count("\x1b[?25l") == errors.count("\x1b[?25h")  # the cursor is shown again


DROPPED = """
import signal, sys, time
from kvpatch import cli

class Dies:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        for _ in range(100):  # the handler runs here, and what it raises is dropped
            pass

def app():
    Dies()
    time.sleep(20)

cli.app = app
cli.main()
"""


def test_an_interrupt_that_python_drops_is_raised_again():
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=15)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr


def test_help_needs_no_torch():
    code = "import sys; from kvpatch import cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_threads_are_set():
    before = torch.get_num_threads()
    try:
        invoke("generate", "--prompt", "a", "--no-compile", "--max-new-tokens", "2", "--threads", "1")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
