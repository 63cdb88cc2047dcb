"""Plans of runs that train adapters alone, against what the trainer allocates, and against numbers by hand."""

from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from penstock.weights.adapter_names import LORA_B, is_adapter
from services.plan import engine_plan, memory_plan
from services.plan.adapter_shape import AdapterShape
from services.plan.memory_plan import plan_memory
from services.plan.model_shape import ModelShape
from services.plan.process_plan import GIB, Gpus, MemoryPlan
from services.plan.working_memory import WorkingBytes
from services.recipe import Recipe
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.config import BackendConfig, LoraConfig
from tests.support.trainer.families import FAMILIES, FULL_FAMILIES, random_qwen3
from tests.support.trainer.ranks.ranked_groups import groups_of

RANK_8 = "--trainer.lora.rank=8"
ACTIVATIONS = 5 * GIB


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Qwen3: sizes 64 and 128, 4 heads of 16, 2 of keys and values, 3 layers."""
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=ACTIVATIONS, logits=0))
    random_qwen3().config.save_pretrained(tmp_path)
    return tmp_path


def plan_of(model: Path, *settings: str, gpus: str = "8x80") -> MemoryPlan:
    """The plan of a recipe with these settings."""
    base = ("--rollout.replicas=1", "--rollout.context_length=1000", f"--model.path={model}")
    recipe = load(Recipe, [], ['--run.name="a"', *base, *settings])
    return plan_memory(model, recipe, Gpus.parse(gpus), image_share=0.25)


def moments(plan: MemoryPlan, name: str) -> dict[str, dict[str, int]]:
    """Of a kind of process, or of the host, by name: the sizes of the parts."""
    processes = {process.name: process.moments for process in plan.processes} | {"host": plan.host}
    return {moment.name: {part.name: part.size_bytes for part in moment.parts} for moment in processes[name]}


IN_LAYER = 8192
"""Parameters of rank 8 in a layer, half of them of A: 8 * (6 * 64 + 128), and of B 8 * (3 * 64 + 2 * 32 + 2 * 128)."""


def test_one_rank(model: Path) -> None:
    """2 bytes for each parameter of the base; 16 for each of the adapters, and copies of these alone for pushes."""
    total = ModelShape.read(model).num_parameters
    adapters = 3 * IN_LAYER
    found = moments(plan_of(model, RANK_8, "--algorithm.kl.kind=k3", "--algorithm.kl.coef=0.01"), "trainer")
    resident = [2 * total, 4 * adapters, 8 * adapters]
    step = [*resident, 4 * adapters, 4 * adapters, ACTIVATIONS, 0, 4 * adapters]  # gradients, reference, pushed
    assert list(found["in a step"].values()) == step
    assert list(found["before a push"].values()) == [*resident, 4 * adapters, 4 * adapters, 2 * adapters]


def test_several_ranks(model: Path) -> None:
    """Shares of both; layers are gathered with their adapters, of which alone there are gradients."""
    shape = ModelShape.read(model)
    total, layer, adapters = shape.num_parameters, shape.num_of_largest_layer, 3 * IN_LAYER
    plan = plan_of(model, RANK_8, "--trainer.ranks=4")
    resident = [total // 2, adapters, 2 * adapters]
    others = 2 * (total - 3 * layer)
    found = moments(plan, "other rank of the trainer")
    assert list(found["back through the layers"].values()) == [
        *(*resident, adapters),
        *(others, 4 * layer + 8 * IN_LAYER, 8 * IN_LAYER, 0, ACTIVATIONS, 0),
    ]
    assert list(found["at the end of the way back"].values()) == [*resident, adapters, 0, 0, 0]
    first = moments(plan, "rank 0 of the trainer")
    assert list(first["before a push"].values()) == [*resident, 0, adapters // 2]
    on_host = moments(plan, "host")
    assert on_host["when the trainer starts"]["what adapters begin with"] == 4 * 4 * adapters
    assert on_host["in a step"]["2 copies of the weights for pushes"] == 2 * 4 * adapters
    assert on_host["in a step"]["checkpoint that is being written"] == 12 * adapters


def test_adapters_of_the_tower_are_gathered_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the whole pass, and so are their gradients."""
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=ACTIVATIONS, logits=0))
    FAMILIES["qwen3_vl"]().config.save_pretrained(tmp_path)
    settings = (RANK_8, "--trainer.ranks=2")
    text, both = (
        moments(plan_of(tmp_path, *settings, f"--trainer.lora.targets={targets}"), "other rank of the trainer")
        for targets in ('["text"]', '["text", "tower"]')
    )
    of_tower = ModelShape.read(tmp_path, LoraConfig(rank=8, targets=("tower",))).adapters
    assert of_tower is not None
    assert of_tower.num_of_text_layers == 0
    layers, end = "back through the layers", "at the end of the way back"
    for moment, name in (
        (layers, "gathered embedding, tower and head"),
        (layers, "gradients of embedding, tower and head"),
        (end, "the same, to be summed"),
    ):
        assert both[moment][name] - text[moment][name] == 4 * of_tower.num_parameters


def test_engines(model: Path) -> None:
    """A push is merged in what they leave of their GPU, and those of several processes compare the base's digests there
    before; the host has the matrices as they were."""
    changed, largest = 3 * 64 * (2 * 64 + 2 * 32 + 3 * 128), 64 * 128
    for tensor_parallel, bytes_of_largest in ((1, 14), (2, 7), (4, 5)):
        plan = plan_of(model, RANK_8, f"--rollout.tensor_parallel={tensor_parallel}")
        push = plan.processes[0].moments[1]
        assert push.total_bytes == 4 * 3 * IN_LAYER + bytes_of_largest * largest
        assert push.room_bytes == 80 * GIB - int(0.85 * 80 * GIB)
        for moment in moments(plan, "host").values():
            assert moment["engines' matrices without adapters"] == 2 * changed
    few = ("--trainer.lora.rank=1", '--trainer.lora.targets=["*k_proj"]', "--rollout.tensor_parallel=2")
    embedding = max(size for _, size in ModelShape.read(model).sizes)
    assert plan_of(model, *few).processes[0].moments[1].total_bytes == 5 * embedding  # whole, both shards, and one


def test_a_rank_holds_whole_rows() -> None:
    """Of a thin A few ranks have any: those have more than their part of it."""
    shape = AdapterShape(rank=3, matrices=(("q.lora_A.weight", (3, 100)), ("q.lora_B.weight", (64, 3))))
    assert shape.num_of_rank(shape.names, ranks=2) == 2 * 100 + 32 * 3
    assert shape.num_of_rank(shape.names, ranks=8) == 1 * 100 + 8 * 3
    assert shape.num_of_rank(shape.scaled, ranks=1) == 64 * 3


def test_patterns_that_fit_nothing_are_refused(model: Path) -> None:
    """In the trainer's words."""
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: no linear layer fits 'q_prj'"):
        plan_of(model, RANK_8, '--trainer.lora.targets=["q_prj"]')


def test_what_is_proposed_goes_with_adapters(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks, and no offload, which they exclude."""
    monkeypatch.setattr(memory_plan, "RESERVED_BYTES", 0)
    monkeypatch.setattr(engine_plan, "push_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    largest = max(moment.total_bytes for process in plan_of(model, RANK_8).processes[1:] for moment in process.moments)
    checkpoints = ("--trainer.gradient_checkpointing=true", "--trainer.micro_batch_tokens=1000")
    engine = ("--rollout.gpu_memory_fraction=0.85", "--rollout.max_total_tokens=9")
    plan = plan_of(model, RANK_8, *checkpoints, *engine, gpus=f"8x{0.99 * largest / GIB:.6f}")
    assert plan.remedy is not None
    assert [name.partition("=")[0] for name in plan.remedy] == ["--trainer.ranks"]


@pytest.mark.parametrize("family", FULL_FAMILIES)
def test_adapters_are_those_of_the_trainer(family: str, tmp_path: Path) -> None:
    """By name and shape, and so are the matrices that they change."""
    model = FAMILIES[family]()
    model.config.save_pretrained(tmp_path)
    targets = ("text", "tower") if "vl" in family else ("text",)
    found = ModelShape.read(tmp_path, LoraConfig(rank=4, targets=targets)).adapters
    assert found is not None
    changed = [model.get_submodule(layer).weight.numel() for layer in found.layers]
    assert found.changed_sizes == changed
    assert found == AdapterShape.add(model, LoraConfig(rank=4, targets=targets))
    layers = getattr(model.base_model, "language_model", model.base_model).layers
    in_layers = [
        sum(matrix.numel() for name, matrix in layer.named_parameters() if is_adapter(name)) for layer in layers
    ]
    assert (found.num_of_largest_layer, found.num_of_text_layers) == (max(in_layers), sum(in_layers))
    assert found.num_parameters == sum(matrix.numel() for name, matrix in model.named_parameters() if is_adapter(name))


def test_one_rank_holds_what_is_planned(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base, adapters, gradients, averages, reference and what it pushes, after a step that trains the text's alone."""
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=ACTIVATIONS, logits=0))
    lora = LoraConfig(rank=4, targets=("text", "tower"))
    config = BackendConfig.model_validate(
        {
            **{"device": "cpu", "dtype": "bfloat16", "lora": lora.model_dump()},
            "optimizer": {"learning_rate": 1e-2, "learning_rates": {"tower": 0.0}},
        }
    )
    algorithm = AlgorithmConfig.model_validate({"kl": {"kind": "k3", "coef": 0.01}})
    backend = InProcessBackend(tiny_model_path, config, algorithm, seed=0, temperature=1.0)
    backend.load(None)
    groups = groups_of(tiny_model_path)
    take_step(backend, [groups], 3)
    parameters = dict(backend.policy.model.named_parameters())
    averages = backend._model.optimizer.state_dict()["averages"]
    pushed = dict(backend.export())
    backend.begin_step(4)
    backend.accumulate(groups)
    trained = backend._model.weights.trained.values()
    gradients = sum(weight.grad.nbytes for weight in trained if weight.grad is not None)
    backend.abort_step()
    assert backend._reference is not None
    reference = sum(weight.nbytes for weight in backend._reference.shards.values())

    settings = (
        *("--trainer.lora.rank=4", '--trainer.lora.targets=["text", "tower"]'),
        *("--trainer.optimizer.learning_rates={tower = 0.0}", "--algorithm.kl.kind=k3", "--algorithm.kl.coef=0.01"),
    )
    plan = plan_of(tiny_model_path, *settings)
    step, push = (moments(plan, "trainer")[name] for name in ("in a step", "before a push"))
    assert step["base in bfloat16"] == sum(each.nbytes for name, each in parameters.items() if not is_adapter(name))
    assert step["adapters in float32"] == sum(each.nbytes for name, each in parameters.items() if is_adapter(name))
    assert step["gradients"] == gradients
    assert step["AdamW's averages"] == sum(
        each.nbytes for state in averages.values() for each in state.values() if each.ndim
    )
    assert step["reference adapters"] == reference
    assert step["copy that was pushed"] == push["copy to be pushed"] == sum(each.nbytes for each in pushed.values())
    scaled = sum(each.nbytes for name, each in pushed.items() if name.endswith(LORA_B))
    assert push["every B, multiplied by the scale"] == scaled
    on_host = moments(plan, "host")["in a step"]
    assert on_host["reference adapters in float32"] == reference
