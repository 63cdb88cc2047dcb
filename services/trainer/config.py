"""Configuration of the trainer: sections `[trainer]` and `[trackers]` of a recipe.

Imports nothing heavy, so that a mistyped key is reported before torch is loaded.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

import pydantic

from penstock.config import (
    BusConfig,
    Config,
    MetricsConfig,
    ModelConfig,
    NetworkConfig,
    RunConfig,
    SamplingConfig,
    TraceConfig,
)
from penstock.config.paths import OptionalPath
from services.trainer.admission.config import FilterConfig
from services.trainer.algorithm.axes import Axis
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.data.config import DataConfig
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.evaluation.config import EvaluationConfig
from services.trainer.telemetry.episodes.config import EpisodesConfig


class ScheduleConfig(Axis):
    """How the learning rate goes on after warm-up, up to step trainer.num_steps. Skipped steps do not count."""

    uses: ClassVar[Mapping[str, str]] = {
        "linear": "min_ratio",
        "cosine": "min_ratio",
        "wsd": "min_ratio decay decay_steps",
    }

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """constant: it stays. linear, cosine: it falls, and reaches the minimum after the last step. wsd: it stays, and
    falls over the last `decay_steps` (warm-up, stable, decay)."""
    min_ratio: float = pydantic.Field(default=0.0, ge=0, le=1)
    """The minimum, as a share of the learning rate (linear, cosine, wsd)."""
    decay_steps: int = pydantic.Field(default=0, ge=0)
    """Steps over which the rate falls at the end; a tenth to a fifth of the run is usual (wsd)."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of the fall (wsd)."""

    @pydantic.model_validator(mode="after")
    def _decays(self) -> Self:
        if self.kind == "wsd" and not self.decay_steps:
            raise ValueError("wsd needs decay_steps; a tenth to a fifth of trainer.num_steps is usual")
        return self


class OptimizerConfig(Config):
    """AdamW and its learning rate."""

    learning_rate: float = pydantic.Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    learning_rates: dict[str, float] = pydantic.Field(default_factory=dict)
    """Other learning rates for parts of the model, by pattern; 0 freezes the part. A pattern is `tower`, `merger`,
    `text` or `head`, or a parameter's name or its end, with `*`: `"visual.*"`. The last one that fits a name counts."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's running averages of the gradient and of its square."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """The learning rate rises linearly over this many steps, before the schedule begins."""
    schedule: ScheduleConfig = ScheduleConfig()
    grad_clip: float = pydantic.Field(default=1.0, gt=0)
    """Largest norm of the whole gradient; a larger one is scaled down to it."""
    offload: bool = False
    """Keep AdamW's averages and the float32 weights in the host's memory, and compute the update there. On the device
    only the weights in trainer.dtype remain; with several ranks, only those of the layers that it computes with.
    Slower; for models that do not fit otherwise. Not run on a GPU yet."""

    @pydantic.field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas

    @pydantic.field_validator("learning_rates")
    @classmethod
    def _are_rates(cls, rates: dict[str, float]) -> dict[str, float]:
        if wrong := [pattern for pattern, rate in rates.items() if not 0 <= rate < math.inf]:
            raise ValueError(f"the rate of {wrong[0]!r} must be 0 or a positive number")
        return rates


class LoraConfig(Config):
    """Low-rank adapters (LoRA): a step trains two thin matrices beside each chosen one, and the model itself stays as
    it is. Checkpoints and pushes hold the adapters alone."""

    rank: int = pydantic.Field(default=0, ge=0, le=1024)
    """Rank of the adapters; 8 to 64 are usual. 0: there are none, and all weights are trained."""
    alpha: float = pydantic.Field(default=32.0, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = pydantic.Field(default=("text",), min_length=1)
    """Linear layers that get an adapter, by pattern: `text` (all of the language model), `tower` or `merger`, or a
    layer's name or its end, with `*`: `"q_proj"`. Output head, experts and routers get none."""

    @pydantic.model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        if not self.rank:
            for name in ("alpha", "targets"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect without adapters; set rank, for example 16")
        return self

    @property
    def scale(self) -> float:
        """Factor on the product of the two matrices."""
        return self.alpha / self.rank


class WeightSyncConfig(Config):
    """How weights travel to the replicas, and how long each stage may take."""

    mode: Literal["retract", "in_place", "drain"] = "retract"
    """What happens to running requests when weights change. retract: their KV is computed again with the new weights.
    in_place: they continue on the KV of the old weights. drain: they finish first, within 30 s,
    while new ones wait."""
    transport: Literal["auto", "broadcast", "disk", "shared_memory", "delta"] = "auto"
    """How weights travel. auto: shared_memory if the trainer computes on a CPU, else broadcast. broadcast: over NCCL
    between GPUs, over gloo between CPUs. disk: replicas read weight files, in a folder that they see under the same
    path as the trainer. shared_memory: replicas on the trainer's machine copy from its memory. With several ranks or
    optimizer.offload that is the host's memory; otherwise, on a GPU, they open it by a CUDA handle, which has been run
    into a plain process, not into an engine. Replicas that cannot use disk or shared_memory get a broadcast. delta: for
    slow links, compressed over gRPC while engines still generate. A replica that holds the version before and is one
    process gets only what changed, others get all weights. It needs time and one more copy in memory in the trainer,
    and room in TMPDIR of trainer and engines."""
    files_dir: OptionalPath = None
    """Folder for the weight files of each version, from which replicas that join later load it. The files are in a
    subfolder with the run folder's name, where the newest two versions are kept. They stay when the run ends, for
    engines that live on; `penstock runs delete` removes them. Unset: only transport disk writes them, to `weights` in
    the run's folder."""
    stage_timeout_s: float = pydantic.Field(default=30.0, gt=0)
    """The longest time of each stage of a push that moves no weights: to prepare, which includes forming the process
    group of a broadcast, and to stop generating. A replica that hangs costs a push this time once."""
    transfer_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """The longest time of each stage of a push that moves or reads all weights: to upload a delta, to receive and load
    the weights, and to compute their digests. Over NCCL, replicas that have not begun to receive within
    TORCH_NCCL_NONBLOCKING_TIMEOUT seconds, 30 by default, fail earlier."""

    def own_files_dir(self, run_folder: Path) -> Path | None:
        """Return the folder in `files_dir` of the run in `run_folder`; None without `files_dir`.

        Runs may share `files_dir`: the versions of each begin at 1, and only one may write in a folder.
        """
        return None if self.files_dir is None else self.files_dir.absolute() / Path(os.path.abspath(run_folder)).name

    def shares_memory(self, *, on_gpu: bool) -> bool:
        """Return whether replicas read the weights from the trainer's memory, which computes on a GPU or does not."""
        return self.transport == "shared_memory" or (self.transport == "auto" and not on_gpu)


class BackendConfig(Config):
    """How an optimizer step is computed: the settings of `[trainer]` that decide what a batch does to the weights."""

    num_steps: int = pydantic.Field(default=100, ge=1)
    """Optimizer steps of the run."""
    micro_batch_tokens: int = pydantic.Field(default=8192, ge=1)
    """Most tokens of one forward pass. Samples are packed without padding; a longer sample has a pass of its own."""
    share_prompts: bool = True
    """Compute what all samples of a group begin with, images included, once per forward pass instead of once per
    sample. A group has one pass, unless it exceeds micro_batch_tokens or fixed_rows cuts it. Saves time and memory, and
    changes results by rounding errors only."""
    fixed_rows: bool = False
    """Pad every forward pass to micro_batch_tokens, so that all have the same shape. Groups are then cut wherever that
    fills a pass."""
    row_lengths: int = pydantic.Field(default=1, ge=1, le=64)
    """With fixed_rows, the number of shapes: a pass is padded to the next multiple of micro_batch_tokens / row_lengths.
    Only the last pass of a step, or of each part of it that is computed as it arrives, is less than full."""
    gradient_checkpointing: bool = False
    """Recompute activations, logits included, in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the layers of text and tower, and what follows the head's products, with torch.compile. On a GPU a step
    is then faster and takes less memory, but the first step takes a minute. The gain is largest with long rows:
    micro_batch_tokens of 16384 or more. Results differ by rounding errors. For dense models on one rank, without
    adapters or linear attention."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of computation and of pushed weights, which rollout.dtype must share. auto: bfloat16 on a GPU, float32
    on a CPU. Master weights are always float32."""
    float32_head: bool = False
    """Multiply the last hidden states with the output head in float32, in the trainer and in all engines: the products
    that differ most between them. Costs time where trainer.dtype and rollout.dtype are less than float32."""
    router_replay: bool = False
    """Have every token go through the experts that the engine chose for it (R3), in place of those that the trainer's
    routers choose; weights of experts are the trainer's. For mixtures of experts whose engines compute in less than
    float32, where the two choose differently and log-probabilities jump. Engines record the experts, one byte for each
    layer and expert of a token. Not for prefill/decode pairs."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()

    @pydantic.model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.compile and self.lora.rank:
            raise ValueError(f"compile = true does not go with lora.rank = {self.lora.rank} yet; leave one of them out")
        return self

    @pydantic.model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.lora.rank and self.optimizer.offload:
            raise ValueError(
                "optimizer.offload = true moves the weights that AdamW updates to the host, and adapters "
                f"(lora.rank = {self.lora.rank}) are small; leave it out"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _rows_are_padded(self) -> Self:
        if self.row_lengths > 1 and not self.fixed_rows:
            raise ValueError(f"row_lengths = {self.row_lengths} has no effect without padding; set fixed_rows = true")
        return self


class TrainerConfig(BackendConfig):
    """The trainer: how much, how stale, and where it computes."""

    port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port on which TrainerService listens; 0 takes any that is free."""
    ranks: int = pydantic.Field(default=1, ge=1)
    """Processes that compute each step together, each on a GPU of its own and with its share of weights, gradients and
    AdamW's averages. The trainer starts them on its machine; leave this unset where torchrun starts them."""
    hsdp_replicas: int = pydantic.Field(default=1, ge=1)
    """Groups of neighbouring ranks that each hold shards of all weights (HSDP); it must divide the number of ranks.
    Weights are gathered inside a group; between groups only each rank's shard of the gradient is summed. For several
    machines, one group on each, if the network between machines is slower than what they have inside. A rank's share of
    the memory is larger by this factor. 1: all ranks are one group."""
    expert_parallel: int = pydantic.Field(default=1, ge=1)
    """Neighbouring ranks that divide the experts of each layer among themselves and send tokens to the owners; it must
    divide the number of ranks and of experts. 1: a layer's experts are all gathered on each rank. For mixtures whose
    layers take too much memory, or too long to gather."""
    sequence_parallel: int = pydantic.Field(default=1, ge=1)
    """Neighbouring ranks that compute each forward pass together (Ulysses): each some of its tokens, and in attention
    some of the heads. It must divide the number of ranks, and the model's heads. For samples whose activations do not
    fit on one GPU; micro_batch_tokens remains the length of the whole pass, of which a rank has this part."""
    groups_per_step: int = pydantic.Field(default=16, ge=1)
    """Prompt groups in the batch of one optimizer step."""
    samples_per_group: int = pydantic.Field(default=8, ge=2)
    """Completions of each prompt; GRPO compares them with each other."""
    max_staleness: int = pydantic.Field(default=1, ge=0)
    """Most versions by which a group's oldest token may lag the published version; 0 is synchronous GRPO."""
    streaming: bool = True
    """Compute the gradient of groups as they arrive, while others are still played. They are computed once they are at
    least an eighth of the batch, and have micro_batch_tokens or, in a batch of more tokens than that, are half of what
    it lacks. Off: wait for the whole batch, so that a step's numbers do not depend on arrival times, not even by
    rounding errors. Algorithms that compare groups with each other always wait."""
    checkpoint_every: int = pydantic.Field(default=10, ge=1)
    """Steps between checkpoints. Groups stay on the bus until a checkpoint holds what became of them."""
    keep_checkpoints: int = pydantic.Field(default=2, ge=1)
    """Checkpoints to keep; older ones are deleted. One that `penstock eval` or `penstock export` reads is deleted at
    the first save after the command has ended."""
    record_groups: bool = False
    """Keep the inputs of every step in the run folder, for `penstock replay`: groups in order, settings, digests."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()

    @pydantic.model_validator(mode="after")
    def _ranks_can_be_divided(self) -> Self:
        if self.compile and self.ranks > 1:
            raise ValueError(f"compile = true does not go with ranks = {self.ranks} yet; leave one of them out")
        for name in ("hsdp_replicas", "expert_parallel", "sequence_parallel"):
            number = getattr(self, name)
            if self.ranks > 1 and self.ranks % number:  # with 1, torchrun may start more
                raise ValueError(f"{name} = {number} does not divide ranks = {self.ranks}; choose a number that does")
        if self.expert_parallel > 1 and self.hsdp_replicas > 1:
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} does not go with hsdp_replicas = {self.hsdp_replicas} yet; "
                "leave one of them out"
            )
        return self

    @property
    def num_shards(self) -> int:
        """Ranks that hold a shard of each weight together."""
        return max(1, self.ranks // self.hsdp_replicas)

    @property
    def keeps_copies_on_host(self) -> bool:
        """Whether the copies of weights for pushes are in the host's memory."""
        return self.ranks > 1 or self.optimizer.offload


class TrackersConfig(Config):
    """Experiment trackers that get every step's metrics beside metrics.jsonl.

    Keys and addresses come from each tracker's own environment variables (docs/metrics.md).
    """

    use: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"], ...] = ()
    """Which ones. `penstock[trackers]` installs the first three. All but trackio keep files in `trackers` in the run's
    folder."""
    project: str = pydantic.Field(default="penstock", min_length=1)
    """Project, or experiment, under which they show the run."""
    run_name: str = ""
    """Name under which they show the run. Empty: the run's id, its name with the time of its start. Trackio always
    shows the id."""

    @pydantic.field_validator("use")
    @classmethod
    def _once_each(cls, use: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(use)) < len(use):
            raise ValueError("a tracker is named twice, and would show the run twice; name each once")
        return use


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """All that a trainer process receives."""

    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    filters: FilterConfig
    run: RunConfig
    network: NetworkConfig
    bus: BusConfig
    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig
    trackers: TrackersConfig
    episodes: EpisodesConfig
    trace: TraceConfig
    evaluation: EvaluationConfig
    demonstrations: DemonstrationsConfig | None
    """None: steps learn none."""
    context_length: int
    """The most tokens of prompt and response together that engines take; 0: what the model allows."""
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    recipe_text: str = ""
    """The recipe that all of this is from, as TOML, for the run folder. Empty: its launcher has written it."""
