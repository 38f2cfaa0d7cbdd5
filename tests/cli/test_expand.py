"""`expand`: from the folder of a trained network of transformers to that of a deeper one."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf

from esper_lightning.__main__ import main
from tests.growth.test_expansion import EXPANDED
from tests.growth.test_stack_networks import CASES, SIZES, START, WORDS, Case, logits, of, small

MIXTRAL = Case(of(hf.MixtralForCausalLM, **SIZES, **WORDS, num_key_value_heads=2, num_local_experts=4), "model.layers")
REFUSED = {"llama": CASES["llama"], "bert": CASES["bert"]} | {
    # Each attention divides its scores by the index of its block.
    "scaled by index": Case(
        of(hf.GPT2LMHeadModel, **SIZES, **WORDS, scale_attn_by_inverse_layer_idx=True), "transformer.h"
    )
}
FOLDERS = {name: case for name, case in EXPANDED.items() if name != "timm"} | {
    "mixtral": MIXTRAL,
    "llama, but its last block": CASES["llama"]._replace(blocks="model.layers[:-1]", left_out=1),
}


def write(case: Case, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Save a network with weights that are not those of its class, in several files."""
    network = small(case).to(dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder, max_shard_size=settings.get("shards", "30KB"))
    return network


def read(case: Case, folder: Path) -> Any:
    """Read a network, which must find exactly its tensors in the files."""
    network, found = type(small(case)).from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return network


@pytest.mark.parametrize("name", FOLDERS)
def test_an_expanded_folder_is_read_by_its_class_and_gives_the_same_outputs_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    case = FOLDERS[name]
    network = write(case, tmp_path / "small")

    main(["expand", str(tmp_path / "small"), f"--blocks={case.blocks}", "--every=2", f"--out={tmp_path / 'deep'}"])

    expanded = read(case, tmp_path / "deep")
    blocks = expanded.get_submodule(case.path)
    assert len(blocks) == START + (START - case.left_out) // 2
    assert torch.equal(logits(expanded, case), logits(network, case))
    expanded.train()(**case.batch)["loss"].backward()
    assert all(any(p.grad is not None and p.grad.any() for p in block.parameters()) for block in blocks)


def test_files_dtype_tied_weights_tokenizer_and_code_are_those_of_the_folder(tmp_path: Path) -> None:
    case, small_folder, deep = FOLDERS["llama"], tmp_path / "small", tmp_path / "deep"
    write(case, small_folder, torch.bfloat16)
    for name in ("tokenizer.json", "modeling_mine.py"):
        (small_folder / name).write_text("{}")
    (small_folder / "templates").mkdir()
    (small_folder / "templates" / "chat.jinja").write_text("{}")
    for other in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "checkpoint-5/config.json",
        "checkpoint-5/model.bin",
    ):
        (small_folder / other).parent.mkdir(exist_ok=True)
        (small_folder / other).write_text("other weights")

    main(["expand", str(small_folder), "--blocks=model.layers", f"--out={deep}"])

    names = {path.name for path in small_folder.iterdir()}
    names -= {"pytorch_model.bin", "consolidated.safetensors", "checkpoint-5"}
    assert {path.name for path in deep.iterdir()} == names and len(names) > 7
    assert (deep / "templates" / "chat.jinja").is_file()
    for path in deep.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
        index = json.loads((deep / "model.safetensors.index.json").read_text())
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(tensors)
    weights = [tensor for path in deep.glob("*.safetensors") for tensor in safetensors.torch.load_file(path).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights)
    expanded = read(case, deep)
    assert expanded.dtype == torch.bfloat16 and len(expanded.model.layers) == 5
    assert expanded.lm_head.weight is expanded.model.embed_tokens.weight
    assert torch.equal(logits(expanded, case), logits(read(case, small_folder), case))


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("llama", ["--out=small"], "'small' exists already"),
        ("llama", ["--every=5"], "every must be 1 to 4"),
        ("llama", ["--zero=[o_proj, fc9]"], "a block has no layer 'fc9' to set to zero"),
        ("llama", ["--blocks=model.layer"], "expand: there is no 'model.layer' in LlamaForCausalLM"),
        ("bert", ["--blocks=bert.encoder.layer"], "expand: BertLayer does not return its input"),
        ("llama", ["--zero=[o_proj]"], "returns other outputs with a new block whose o_proj are zero"),
        ("scaled by index", ["--blocks=transformer.h"], "its blocks depend on their index"),
        ("none", [], "lacks config.json, model.safetensors"),
    ],
)
def test_what_cannot_be_expanded_is_refused_in_one_line_and_leaves_nothing(
    name: str, arguments: list[str], problem: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if name in REFUSED:
        write(REFUSED[name], Path("small"))
    with pytest.raises(SystemExit):
        main(["expand", "small", "--blocks=model.layers", "--out=deep", *arguments])

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert problem in line
    assert {path.name for path in tmp_path.iterdir()} <= {"small"}
