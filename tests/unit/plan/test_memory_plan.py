"""What is counted from a model's shape, against numbers worked out by hand; activations are a given number here."""

import json
from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from services.plan import engine_plan, memory_plan, proposals
from services.plan.memory_plan import plan_memory
from services.plan.model_shape import ModelShape
from services.plan.process_plan import GIB, Gpus, MemoryPlan
from services.plan.working_memory import RowShape, WorkingBytes
from services.recipe import Recipe
from tests.support.trainer.families import random_qwen3, random_qwen3_moe, random_qwen3_vl

ACTIVATIONS, LOGITS = 5 * GIB, GIB
BASE = ("--rollout.replicas=1", "--rollout.context_length=1000", "--trainer.dtype=auto")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Qwen3: 4 heads of 16, 2 of keys and values, 3 layers."""
    monkeypatch.setattr(
        memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=ACTIVATIONS, logits=LOGITS)
    )
    random_qwen3().config.save_pretrained(tmp_path)
    return tmp_path


def plan_of(model: Path, *settings: str, gpus: str = "8x80") -> MemoryPlan:
    """The plan of a recipe with these settings."""
    recipe = load(Recipe, [], ['--run.name="a"', f"--model.path={model}", *BASE, *settings])
    return plan_memory(model, recipe, Gpus.parse(gpus), image_share=0.25)


def reserve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that are about as large as the model."""
    monkeypatch.setattr(memory_plan, "RESERVED_BYTES", 0)
    monkeypatch.setattr(engine_plan, "push_bytes", lambda *_, **__: 0)


def a_mib_for_each_token(_: ModelShape, row: RowShape, **__: object) -> WorkingBytes:
    """What a row is taken to need."""
    return WorkingBytes(activations=row.num_tokens << 20, logits=0)


def moments(plan: MemoryPlan, name: str) -> dict[str, dict[str, int]]:
    """Of a kind of process, by name: the sizes of the parts."""
    (process,) = [process for process in plan.processes if process.name == name]
    return {moment.name: {part.name: part.size_bytes for part in moment.parts} for moment in process.moments}


def test_one_rank(model: Path) -> None:
    """18 bytes a parameter, a copy that was pushed, and at a push another."""
    shape = ModelShape.read(model)
    total = shape.num_parameters
    found = moments(plan_of(model), "trainer")
    assert list(found["in a step"].values()) == [
        4 * total,
        8 * total,
        2 * total,
        4 * total,
        ACTIVATIONS,
        LOGITS,
        2 * total,
    ]
    assert list(found["before a push"].values()) == [4 * total, 8 * total, 2 * total, 2 * total, 2 * total]


def test_frozen_parts_have_neither_gradients_nor_averages(model: Path) -> None:
    """The head, which this model does not tie."""
    shape = ModelShape.read(model)
    head = dict(shape.sizes)["lm_head.weight"]
    found = moments(plan_of(model, "--trainer.optimizer.learning_rates={head = 0.0}"), "trainer")
    assert found["in a step"]["gradients"] == 4 * (shape.num_parameters - head)
    offloaded = plan_of(model, "--trainer.optimizer.learning_rates={head = 0.0}", "--trainer.optimizer.offload=true")
    [of_step] = [moment for moment in offloaded.host if moment.name == "in a step"]
    sizes = {part.name: part.size_bytes for part in of_step.parts}
    trained = shape.num_parameters - head
    assert (sizes["gradients"], sizes["AdamW's averages"]) == (4 * trained, 8 * trained)


def test_offload(model: Path) -> None:
    """The device has the rounded weights only; copies for pushes are on the host too."""
    shape = ModelShape.read(model)
    total, largest = shape.num_parameters, max(size for _, size in shape.sizes)
    plan = plan_of(model, "--trainer.optimizer.offload=true")
    found = moments(plan, "trainer")
    assert list(found["in a step"].values()) == [2 * total, 0, ACTIVATIONS, LOGITS, 0]
    assert list(found["before a push"].values()) == [2 * total, 0, 2 * largest]
    (copies,) = [part for part in plan.host[-1].parts if part.name == "2 copies of the weights for pushes"]
    assert copies.size_bytes == 4 * total


def test_offload_of_several_ranks(model: Path) -> None:
    """The devices have gathered layers, activations and gradients that are being summed; all else is on the hosts."""
    held, offloaded = (
        moments(plan_of(model, "--trainer.ranks=4", *also), "other rank of the trainer")
        for also in ((), ("--trainer.optimizer.offload=true",))
    )
    assert held.keys() == offloaded.keys()
    for name, parts in offloaded.items():
        on_host = {part: size for part, size in parts.items() if part.endswith("on the host")}
        assert set(on_host.values()) == {0}
        assert parts.items() - on_host.items() <= held[name].items()


def test_several_ranks(model: Path) -> None:
    """Shares, what is gathered, and on rank 0 what passes to the host for pushes."""
    shape = ModelShape.read(model)
    total, layer = shape.num_parameters, shape.num_of_largest_layer
    largest = max(size for _, size in shape.sizes)
    others = total - 3 * layer
    plan = plan_of(model, "--trainer.ranks=4")
    assert [(process.name, process.count) for process in plan.processes][1:] == [
        ("rank 0 of the trainer", 1),
        ("other rank of the trainer", 3),
    ]
    shares = [total, 2 * total, total]  # a quarter of 4, 8 and 4 bytes
    of_layers = [*shares, 2 * others, 4 * layer, 6 * layer, 2 * others, ACTIVATIONS, LOGITS]
    found = moments(plan, "other rank of the trainer")
    assert list(found["back through the layers"].values()) == of_layers
    assert list(found["as a layer is gathered"].values()) == [*shares, 2 * others, 2 * others, 4 * layer]
    assert list(found["at the end of the way back"].values()) == [*shares, 2 * others, 4 * others, others]
    first = moments(plan, "rank 0 of the trainer")
    assert list(first["back through the layers"].values()) == [*of_layers, 0]
    assert list(first["before a push"].values()) == [total, 2 * total, 0, largest // 2]


def test_replicas(model: Path) -> None:
    """Two of two shards: a GPU has what one of two ranks has. At a push, too: one replica writes, a half each."""
    shape = ModelShape.read(model)
    total, largest = shape.num_parameters, max(size for _, size in shape.sizes)
    plan, two = plan_of(model, "--trainer.ranks=4", "--trainer.hsdp_replicas=2"), plan_of(model, "--trainer.ranks=2")
    assert [process.count for process in plan.processes] == [1, 1, 3]
    for name in ("rank 0 of the trainer", "other rank of the trainer"):
        found = moments(plan, name)
        assert list(found["back through the layers"].values())[:3] == [2 * total, 4 * total, 2 * total]
        assert found == moments(two, name)
    assert list(moments(plan, "rank 0 of the trainer")["before a push"].values()) == [2 * total, 4 * total, 0, largest]


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Qwen3-MoE: 6 experts in each of 3 layers."""
    monkeypatch.setattr(
        memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=ACTIVATIONS, logits=LOGITS)
    )
    random_qwen3_moe().config.save_pretrained(tmp_path)
    return tmp_path


def test_divided_experts(mixture: Path) -> None:
    """A rank has whole experts only, and gathers those that it owns: of 3, four ranks have 2 in the largest shard."""
    shape = ModelShape.read(mixture)
    total, layer = shape.num_parameters, shape.num_of_largest_layer
    in_layer = 6 * 3 * 64 * 192
    assert sum(size for name, size in shape.sizes if ".experts." in name) == 3 * in_layer
    others = total - 3 * in_layer
    found = moments(plan_of(mixture, "--trainer.ranks=4", "--trainer.expert_parallel=2"), "other rank of the trainer")
    on_rank = others + 4 * 3 * in_layer * 2 // 6  # a quarter of 4 bytes, and of 6 experts 2
    gathered = layer - in_layer // 2
    outside = total - 3 * layer
    assert list(found["back through the layers"].values()) == [
        *(on_rank, 2 * on_rank, on_rank),
        *(2 * outside, 4 * gathered, 6 * gathered, 2 * outside, ACTIVATIONS, LOGITS),
    ]


def test_experts_are_divided_where_that_makes_a_model_fit(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By no more ranks than it takes; and what cannot be divided is refused."""
    reserve_nothing(monkeypatch)
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    engine = ("--rollout.gpu_memory_fraction=0.85", "--rollout.max_total_tokens=9", "--trainer.ranks=6")

    def taken(expert_parallel: int) -> int:
        plan = plan_of(mixture, *engine, f"--trainer.expert_parallel={expert_parallel}")
        return max(moment.total_bytes for process in plan.processes[1:] for moment in process.moments)

    assert taken(1) > taken(2) > taken(6)
    short = plan_of(mixture, *engine, gpus=f"7x{(taken(1) + taken(2)) / 2 / GIB:.6f}")
    assert short.remedy == ("--trainer.expert_parallel=2",)
    with pytest.raises(ConfigError, match=r"expert_parallel = 4 does not divide the model's 6 experts"):
        plan_of(mixture, "--trainer.ranks=4", "--trainer.expert_parallel=4")
    with pytest.raises(ConfigError, match=r"trainer\.compile = true does not go with mixtures of experts"):
        plan_of(mixture, "--trainer.ranks=1", "--trainer.compile=true")


def test_a_dense_model_has_no_experts_to_divide(model: Path) -> None:
    """None is proposed either."""
    with pytest.raises(ConfigError, match=r"expert_parallel = 2 is for mixtures of experts"):
        plan_of(model, "--trainer.ranks=2", "--trainer.expert_parallel=2")
    tight = plan_of(model, "--trainer.ranks=2", gpus="3x5")
    assert not any("expert_parallel" in each for each in tight.remedy or ())


def test_ranks_that_share_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are those of a share of the row; it is proposed where a model then fits, and refused by heads."""
    reserve_nothing(monkeypatch)
    monkeypatch.setattr(
        memory_plan,
        "working_bytes",
        lambda *_, sequence_parallel, **__: WorkingBytes(activations=ACTIVATIONS // sequence_parallel, logits=0),
    )
    shared = ("--trainer.ranks=4", "--trainer.sequence_parallel=2")
    parts = moments(plan_of(model, *shared), "other rank of the trainer")["back through the layers"]
    assert parts["activations of a share of 1/2 of 8,192 tokens, 0 of images"] == ACTIVATIONS // 2
    long = ("--trainer.ranks=4", "--trainer.micro_batch_tokens=2048", "--trainer.gradient_checkpointing=true")
    assert plan_of(model, *long, gpus="5x5").remedy == ("--trainer.sequence_parallel=2",)
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 3 cannot share the model's 4 attention heads"):
        plan_of(model, "--trainer.ranks=3", "--trainer.sequence_parallel=3")


def test_a_reference_policy(model: Path) -> None:
    """One rank has it in a step and not at a push; several have their shares of it without activations."""
    total = ModelShape.read(model).num_parameters
    kl = ("--algorithm.kl.kind=k3", "--algorithm.kl.coef=0.01")
    found = moments(plan_of(model, *kl), "trainer")
    assert found["in a step"]["reference policy"] == 2 * total
    assert "reference policy" not in found["before a push"]
    found = moments(plan_of(model, *kl, "--trainer.ranks=2"), "other rank of the trainer")
    with_it = [name for name, parts in found.items() if any("reference" in part for part in parts)]
    assert with_it == ["while the reference computes"]
    assert ACTIVATIONS not in found[with_it[0]].values()


def test_deltas_need_one_more_copy(model: Path) -> None:
    """Of the version before, to say what has changed."""
    total = ModelShape.read(model).num_parameters
    found = moments(plan_of(model, "--trainer.weight_sync.transport=delta"), "trainer")
    assert found["in a step"]["copy before it, for deltas"] == 2 * total


def test_engines(model: Path) -> None:
    """Matrices and caches are shared by the GPUs of an engine; a cache has no more than it may."""
    shape = ModelShape.read(model)
    per_token = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, sizes, bytes
    found = moments(plan_of(model), "engine")
    assert list(found["at least"].values()) == [2 * shape.num_parameters, 1000 * per_token]
    plan = plan_of(model, "--rollout.tensor_parallel=4")
    found = moments(plan, "GPU of an engine of 4")
    norms = sum(size for name, size in shape.sizes if name.endswith("norm.weight"))
    share = 2 * (norms + (shape.num_parameters - norms) // 4)
    assert list(found["at least"].values()) == [share, 1000 * per_token // 2]
    plan = plan_of(model, "--rollout.max_total_tokens=600")
    assert list(moments(plan, "engine")["at least"].values())[1] == 600 * per_token
    assert plan.processes[0].notes == ("its KV cache holds 600 tokens, 1.0 samples of 600",)
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel = 3 cannot share the model's 4 heads"):
        plan_of(model, "--rollout.tensor_parallel=3")


def test_one_gpu_is_shared(model: Path) -> None:
    """The trainer has what engines leave, and less a reserve for each process, in which an engine takes pushes."""
    plan = plan_of(model, "--rollout.gpu_memory_fraction=0.25", gpus="1x40")
    assert [process.room_bytes for process in plan.processes] == [10 * GIB, (40 - 10 - 2 - 2) * GIB]
    assert plan.processes[0].moments[1].room_bytes == 2 * GIB


def test_a_push_has_to_fit_beside_the_engines_share(model: Path) -> None:
    """Of a small model it takes the weights once more, in one bucket."""
    narrow = plan_of(model, "--rollout.gpu_memory_fraction=0.999999")  # 84 KiB are left
    push = narrow.processes[0].moments[1]
    assert {part.name: part.size_bytes for part in push.parts} == {"push buffers": 2 * narrow.shape.num_parameters}
    assert push.room_bytes is not None
    assert push.room_bytes < push.total_bytes < 80 * GIB - push.room_bytes
    assert not narrow.processes[0].fits
    assert narrow.remedy == ("--rollout.gpu_memory_fraction=0.85",)
    assert plan_of(model, "--rollout.gpu_memory_fraction=0.99").fits


def test_room_for_a_push_is_proposed_with_what_the_trainer_lacks(model: Path) -> None:
    """Both may be too large."""
    recipe = load(Recipe, [], [f"--model.path={model}", "--rollout.replicas=1", "--rollout.gpu_memory_fraction=0.99"])
    both = {"rollout.gpu_memory_fraction": 0.85, "trainer.ranks": 7}
    assert any(both.items() <= settings.items() for settings in proposals.proposals(recipe, Gpus.parse("8x80")))


def test_what_bounds_a_sample_bounds_a_row(model: Path) -> None:
    """A longer sample than micro_batch_tokens has a row of its own; where nothing bounds it, that is said."""
    short = ("--trainer.micro_batch_tokens=100", "--rollout.context_length=0")
    bounded = plan_of(model, *short, "--data.limits.max_tokens=700")
    assert "activations of 700 tokens, 0 of images" in moments(bounded, "trainer")["in a step"]
    unbounded = plan_of(model, *short, "--sampling.max_new_tokens=300")
    assert "activations of 300 tokens, 0 of images" in moments(unbounded, "trainer")["in a step"]
    assert unbounded.processes[1].notes[1] == "a sample of more than 300 tokens takes more"


def test_demonstrations_take_rows_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed one by one, so the one that takes most counts: the longest demonstration, if it is longer."""
    monkeypatch.setattr(memory_plan, "working_bytes", a_mib_for_each_token)
    rows = ("--trainer.micro_batch_tokens=2000", '--demonstrations.path="rows.jsonl"')
    found = moments(plan_of(model, *rows, "--demonstrations.max_tokens=3000"), "trainer")["in a step"]
    assert found["activations of 3,000 tokens of demonstrations, 0 of images"] == 3000 << 20
    shorter = plan_of(model, *rows, "--demonstrations.max_tokens=1000")
    assert moments(shorter, "trainer")["in a step"]["activations of 2,000 tokens, 0 of images"] == 2000 << 20
    assert not any("demonstration" in note for note in shorter.processes[1].notes)
    unbounded = plan_of(model, *rows)
    assert unbounded.processes[1].notes[1] == (
        "a demonstration of more than 2,000 tokens takes more; demonstrations.max_tokens bounds them"
    )


def test_rows_are_not_made_shorter_than_a_demonstration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would win nothing: a longer one has a row of its own."""
    monkeypatch.setattr(memory_plan, "working_bytes", a_mib_for_each_token)
    rows = ("--trainer.micro_batch_tokens=8192", '--demonstrations.path="rows.jsonl"')
    assert plan_of(model, *rows, gpus="2x7").remedy == ("--trainer.micro_batch_tokens=4096",)
    assert plan_of(model, *rows, "--demonstrations.max_tokens=8000", gpus="2x7").remedy is None


def test_more_ranks_or_a_smaller_share_are_proposed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there are GPUs for; on a shared GPU the engines' share is lowered."""
    reserve_nothing(monkeypatch)
    total = ModelShape.read(model).num_parameters
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    gib = 11 * total / GIB  # a rank of one needs 18 bytes a parameter, rank 0 of seven fewer
    plan = plan_of(model, "--trainer.gradient_checkpointing=true", gpus=f"8x{gib:.6f}")
    assert plan.remedy is not None
    assert [name.partition("=")[0] for name in plan.remedy] in (["--trainer.ranks"], ["--trainer.optimizer.offload"])
    shared = plan_of(model, "--rollout.gpu_memory_fraction=0.85", gpus=f"1x{12 * total / GIB:.6f}")
    assert shared.remedy == ("--rollout.gpu_memory_fraction=0.6", "--trainer.optimizer.offload=true")


def test_ranks_are_proposed_in_place_of_compiling(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is for one rank; left on, every proposal with more of them would be refused."""
    reserve_nothing(monkeypatch)
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    gpus = f"8x{11 * ModelShape.read(model).num_parameters / GIB:.6f}"
    settings = ("--trainer.compile=true", "--trainer.gradient_checkpointing=true")
    plan = plan_of(model, *settings, gpus=gpus)
    assert plan.remedy is not None
    assert [name.partition("=")[0] for name in plan.remedy] == ["--trainer.ranks", "--trainer.compile"]
    assert plan_of(model, *settings, *plan.remedy, gpus=gpus).fits


def test_engines_of_more_gpus_are_proposed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one has no room for the weights, and no more than that takes."""
    reserve_nothing(monkeypatch)
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=0, logits=0))
    monkeypatch.setattr(proposals, "USUAL_FRACTION", 0.09)
    gib = 20 * ModelShape.read(model).num_parameters / GIB  # of which weights need 2 in an engine
    plan = plan_of(model, "--rollout.gpu_memory_fraction=0.09", "--rollout.max_total_tokens=9", gpus=f"8x{gib:.6f}")
    assert plan.remedy == ("--rollout.tensor_parallel=2",)


def test_engines_of_more_gpus_divide_experts_as_before(tmp_path: Path) -> None:
    """As wholes, if the recipe says so; what the model's experts do not allow is refused, not planned."""
    random_qwen3_moe(num_experts=6).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.expert_parallel = 4 does not divide the model's 6 experts"):
        plan_of(tmp_path, "--rollout.tensor_parallel=4", "--rollout.expert_parallel=4")
    recipe = load(
        Recipe, [], [f"--model.path={tmp_path}", "--rollout.tensor_parallel=2", "--rollout.expert_parallel=2"]
    )
    larger = [each for each in proposals.proposals(recipe, Gpus.parse("16x80")) if "rollout.tensor_parallel" in each]
    sizes = {(each["rollout.tensor_parallel"], each["rollout.expert_parallel"]) for each in larger}
    assert sizes == {(4, 4), (8, 8)}


def test_offload_is_proposed_beside_divided_experts(tmp_path: Path) -> None:
    """And divided experts beside offload."""
    random_qwen3_moe(num_experts=6).config.save_pretrained(tmp_path)

    def proposed(*settings: str) -> list[dict[str, object]]:
        recipe = load(Recipe, [], [f"--model.path={tmp_path}", "--trainer.ranks=2", *settings])
        return list(proposals.proposals(recipe, Gpus.parse("4x80")))

    assert any(each.get("trainer.optimizer.offload") for each in proposed("--trainer.expert_parallel=2"))
    assert any(each.get("trainer.expert_parallel") == 2 for each in proposed("--trainer.optimizer.offload=true"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", "36"), ("num_attention_heads", 0), ("hidden_size", -1), ("model_type", "gemma3")],
)
def test_a_config_that_describes_no_model(tmp_path: Path, key: str, value: object) -> None:
    """One error that names the file, or the type."""
    config = random_qwen3().config.to_dict() | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ConfigError, match=r"model\.path: .*(config\.json|gemma3)"):
        ModelShape.read(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    """It is not looked for on the Hub."""
    with pytest.raises(ConfigError, match=r"this folder has no config\.json"):
        ModelShape.read(tmp_path / "Qwen" / "Qwen3-0.6B")


def test_a_towers_heads_are_divided_too(tmp_path: Path) -> None:
    """By the GPUs of an engine, as those of the text are."""
    config = random_qwen3_vl().config
    config.save_pretrained(tmp_path)
    shape = ModelShape.read(tmp_path)
    shape.require_divisible(2)
    with pytest.raises(ConfigError, match="of the tower"):
        shape.require_divisible(16)
