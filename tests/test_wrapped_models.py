"""Models that other libraries have changed: adapters, quantised layers, device maps, saved generation configs."""

import pytest
import torch
from factories import left_padded, llama, prompts, run
from transformers import AutoModelForCausalLM, GenerationConfig

import kvpatch

BATCH = left_padded(prompts((30, 12)))


@pytest.fixture
def adapted():
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model = llama(dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at first: the adapter would do nothing
                torch.nn.init.normal_(parameter, std=0.3)
    return adapted


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_an_adapted_model_is_patched_through_its_wrapper(adapted, compile):
    expected = run(adapted, BATCH)
    with adapted.disable_adapter():
        plain = run(adapted, BATCH)
    assert not torch.equal(plain, expected)
    handle = kvpatch.patch(adapted, "inertia-lazy", budget=1.0, compile=compile)
    assert torch.equal(run(adapted, BATCH), expected)
    assert handle.stats.steps == 39
    with adapted.disable_adapter():
        assert torch.equal(run(adapted, BATCH), plain)
    assert "LlamaForCausalLM" in str(kvpatch.explain(adapted))
    kvpatch.unpatch(adapted)
    assert "_kvpatch" not in adapted.get_base_model().__dict__
    assert torch.equal(run(adapted, BATCH), expected)


def test_an_adapter_merged_after_patching_is_met(adapted):
    expected = run(adapted, BATCH)
    handle = kvpatch.patch(adapted, "inertia-lazy", budget=1.0, compile=False)
    run(adapted, BATCH)
    adapted.merge_adapter()
    merged = run(adapted, BATCH)
    assert handle.stats.steps == 39
    adapted.unmerge_adapter()
    assert torch.equal(run(adapted, BATCH), expected)
    assert merged.shape == expected.shape


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model = peft.get_peft_model(llama(), peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    with pytest.raises(kvpatch.UnsupportedModelError, match="PrefixTuningConfig"):
        kvpatch.patch(model, "full")


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [1, 2])
def test_weights_quantised_to_eight_bits_decode(compile, rows):
    torchao = pytest.importorskip("torchao.quantization", reason="quantised weights need torchao")
    model = llama(dtype=torch.float32, query_groups=4)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    batch = {name: value[:rows, :] for name, value in BATCH.items()}
    expected = run(model, batch)
    with kvpatch.patched(model, "full", compile=compile) as handle:
        assert torch.equal(run(model, batch), expected)
        assert handle.stats.steps == 39


def test_a_device_map_of_one_device_is_patched_and_one_of_several_is_refused(tmp_path):
    pytest.importorskip("accelerate", reason="device maps need accelerate")
    llama(dtype=torch.float32).save_pretrained(tmp_path / "model")
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="cpu").eval()
    expected = run(mapped, BATCH)
    with kvpatch.patched(mapped, "full", compile=False):
        assert torch.equal(run(mapped, BATCH), expected)
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        | {"lm_head": "cpu"},
        offload_folder=str(tmp_path / "offloaded"),
    ).eval()
    with pytest.raises(kvpatch.UnsupportedModelError, match="meta device|offload"):
        kvpatch.patch(offloaded, "full")


def test_a_saved_generation_config_is_followed(tmp_path):
    model = llama()
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=7,
        temperature=0.7,
        max_new_tokens=9,
        repetition_penalty=1.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64).eval()
    torch.manual_seed(1)
    expected = loaded.generate(**BATCH)
    assert expected.shape[1] <= 30 + 9
    with kvpatch.patched(loaded, "inertia", budget=1.0, compile=False):
        torch.manual_seed(1)
        assert torch.equal(loaded.generate(**BATCH), expected)
