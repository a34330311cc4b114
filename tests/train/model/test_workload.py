import pytest
import torch
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact import fingerprint, numerics
from mainstay_train.model import blocks, losses, workload
from mainstay_train.models import llama_config

CPU = torch.device("cpu")
SMALL = {"dim": 16, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}


def test_the_built_in_llama_comes_in_by_the_same_door():
    model = workload.load("mainstay_train.models.llama:workload", SMALL)
    assert [spec.name for spec in model.blocks] == ["embedding", "layers.0", "layers.1", "head"]
    assert model.activation_shape == (1, 8, 16)
    assert model.fingerprint(CPU) == workload.load("", SMALL).fingerprint(CPU)
    assert [len(r) for r in model.stages(4)] == [1, 1, 1, 1]
    with pytest.raises(InvalidSpecError, match=r"parallelism\.stages: stages is 5 but .* 4 blocks"):
        model.stages(5)


def test_the_demo_model_has_its_announced_size_and_balances():
    model = workload.load("", {"dim": 192, "layers": 8, "hidden": 576})
    parameters = sum(flat.num_parameters for flat in model.layouts())
    assert 3.4e6 < parameters < 3.7e6
    assert [len(r) for r in model.stages(2)] == [5, 5]


def test_a_layout_of_shapes_alone_equals_the_built_one():
    model = workload.load("", SMALL)
    assert model.layouts() == tuple(block.layout for block in model.build(range(4)))


def test_a_file_can_be_an_entrypoint():
    model = workload.load("examples/custom_model.py:workload", {"layers": 2})
    assert [spec.name for spec in model.blocks] == ["embedding", "mixers.0", "mixers.1", "head"]


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("workload", '"module:function"'),
        ("nowhere_at_all:f", "no module 'nowhere_at_all'"),
        ("mainstay_train.models.nowhere:f", "no module 'mainstay_train.models.nowhere'"),
        ("nowhere/model.py:f", "no file 'nowhere/model.py'"),
        ("mainstay_train.models.llama:nothing", "no function 'nothing' .*workload"),
        ("operator:is_", "must return a mainstay_train.workload.Workload"),
        ("shutil:get_archive_formats", r"must take \(config, args\)"),
    ],
)
def test_a_wrong_entrypoint_says_what_is_wrong(entrypoint, message):
    with pytest.raises(InvalidSpecError, match=message):
        workload.load(entrypoint, {})


def test_a_missing_dependency_of_the_users_module_is_named(tmp_path, monkeypatch):
    (tmp_path / "my_model_module.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidSpecError, match="'my_model_module' needs 'not_installed_here'"):
        workload.load("my_model_module:workload")
    with pytest.raises(InvalidSpecError, match="needs 'not_installed_here'"):
        workload.load(f"{tmp_path}/my_model_module.py:workload")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head": 4}, r"workload\.config\.head: is unknown; did you mean 'heads'\? \(valid: .*dim"),
        ({"data": {"folder": "x"}}, r"config\.data\.folder: is unknown .*valid: path"),
        ({"data": "x"}, "must be a mapping"),
        ({"dim": "192"}, r"config\.dim: must be of type int, got '192'"),
        ({"dim": True}, "must be of type int"),
        ({"lr": "fast"}, "must be of type float"),
        ({"dim": 0}, r"config\.dim: must be above 0, got 0"),
        ({"heads": 5}, "must divide dim 192, got 5"),
        ({"heads": 6, "kvHeads": 4}, "must divide heads 6, got 4"),
        ({"dropout": 1.0}, "below 1"),
        ({"vocab": 100}, "256 byte values"),
        ({"dtype": "float16"}, "must be one of float32, bfloat16"),
    ],
)
def test_a_wrong_configuration_names_key_value_and_rule(config, message):
    with pytest.raises(InvalidSpecError, match=message):
        llama_config.parse_config(config, llama_config.LlamaConfig)


def test_arguments_for_the_built_in_model_are_refused():
    with pytest.raises(InvalidSpecError, match=r"workload\.args"):
        workload.load("", SMALL, ["--fast"])


def test_blocks_that_form_no_pipeline_are_refused():
    good = workload.load("", SMALL)

    def remade(specs):
        return workload.Workload(
            blocks=tuple(specs),
            dataset=good.dataset,
            activation_shape=good.activation_shape,
            learning_rate=good.learning_rate,
        )

    with pytest.raises(InvalidSpecError, match="needs an input and an output block"):
        remade(good.blocks[:1])
    with pytest.raises(InvalidSpecError, match=r"\['embedding'\] are not"):
        remade([good.blocks[0], *good.blocks])
    with pytest.raises(InvalidSpecError, match="must have a loss"):
        remade(good.blocks[:-1])
    extra = blocks.BlockSpec(name="x", build=nn.Identity, loss=losses.cross_entropy_sum)
    with pytest.raises(InvalidSpecError, match="only it"):
        remade([extra, *good.blocks])


def test_the_fingerprint_names_what_differs():
    numerics.setup("cpu")
    model = workload.load("", SMALL)
    ours = fingerprint.fingerprint("cpu", dtype=model.dtype, extra=model.fingerprint(CPU))
    again = fingerprint.fingerprint("cpu", dtype=model.dtype, extra=model.fingerprint(CPU))
    assert fingerprint.differences(ours, again) == ()
    other = fingerprint.fingerprint("cpu", dtype=torch.bfloat16, extra=model.fingerprint(CPU))
    assert fingerprint.differences(ours, other) == ("dtype is 'bfloat16', the job's is 'float32'",)
    assert ours["threads"] == "1"
    assert ours["deterministic"] == "True"


def test_an_absent_or_unsupported_device_is_refused():
    with pytest.raises(ValueError, match="must be cpu or cuda, not 'meta'"):
        numerics.setup("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA device"):
            numerics.setup("cuda")
