"""Optimizer steps on one GPU: attention over packed rows, packed beside padded log-probabilities, MFU and memory.

    python bench/gpu/bench_train_step.py            # on a machine with a GPU: Qwen3-VL-2B's shape, random weights
    python bench/gpu/bench_train_step.py --cpu      # anywhere, in a minute: a tiny model, the same code otherwise

Three tables, for docs/benchmarks.md:

- attention: `varlen_attn` over gathered keys against a full mask in float32, outputs and gradients. It pins that causal
  means aligned at the bottom right where a segment has fewer queries than keys, and that the backward pass fits the
  forward pass.
- log-probabilities of group rows, of packed rows and of padded samples through transformers' own attention.
- steps of the trainer, with group rows and without, with recomputed activations and without, compiled and not:
  tokens/s, MFU, memory. With --profile, also what the GPU does in each, for how long it waits, and where the host waits
  for it.

Bar: 45% MFU with group rows, on a GPU whose peak is known. The exit code is 1 if it fails. The numbers of --cpu mean
nothing.
"""

import argparse
import importlib.metadata
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402 - after the path is set
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from bench.gpu.random_model import write_model  # noqa: E402
from bench.trainer.padded import PaddedPolicy  # noqa: E402
from penstock.model.tokens import forbidden_token_ids, image_token_id  # noqa: E402
from services.trainer.algorithm.config import AlgorithmConfig  # noqa: E402
from services.trainer.backend.base import take_step  # noqa: E402
from services.trainer.backend.device import peak_tflops  # noqa: E402
from services.trainer.backend.in_process import InProcessBackend  # noqa: E402
from services.trainer.backend.policy.attention import RowLayout, packed_attention  # noqa: E402
from services.trainer.backend.policy.model_flops import model_flops  # noqa: E402
from services.trainer.batching.images import ImagePatches  # noqa: E402
from services.trainer.batching.packing import num_row_tokens, pack  # noqa: E402
from services.trainer.batching.product_counts import ProductCounts  # noqa: E402
from services.trainer.batching.rows import Segment, build_row  # noqa: E402
from services.trainer.batching.sequences import TrainGroup, TrainSequence  # noqa: E402
from services.trainer.config import BackendConfig  # noqa: E402

LEAST_MFU = 0.45
STEPS = (
    (True, False, True, 16384),
    (True, False, True, 32768),
    (True, False, True, 8192),
    (True, True, True, 32768),
    (False, False, True, 16384),
    (True, False, False, 16384),
    (True, True, False, 16384),
)
"""Whether prompts are shared, activations recomputed and layers compiled, and the most tokens of a row."""
KERNELS = (
    ("attention", re.compile(r"flash|fmha|sdpa", re.IGNORECASE)),
    ("products", re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.IGNORECASE)),
    ("compiled", re.compile(r"triton", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor|adam", re.IGNORECASE)),
    ("copies from and to the host", re.compile(r"memcpy (htod|dtoh)", re.IGNORECASE)),
    ("all else", re.compile("")),
)
"""Kinds of a GPU's work by the names of its kernels; the first that fits counts."""
MOST_KERNELS = 25
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def attention_table(device: torch.device) -> str:
    """Compare outputs and gradients with a full mask in float32, on segments of a group row and of packed rows.

    On a CPU, which takes seconds for long ones, they are a quarter as long.
    """
    part = 1 if device.type == "cuda" else 4
    lengths = [
        (f"prompt {450 // part}, responses {100 // part}-{1500 // part}", 450 // part, [100, 380, 900, 1500]),
        ("no prompt", 0, [700, 64, 1300]),
    ]
    lines = ["| segments | what | largest error | of values up to |", "|---|---|---|---|"]
    for name, prompt, responses in lengths:
        segments = [Segment(start=0, stop=prompt)] if prompt else []
        start = prompt
        for length in (each // part for each in responses):
            segments.append(Segment(start=start, stop=start + length, prefix_start=0, prefix_stop=prompt))
            start += length
        mask = torch.zeros(start, start, dtype=torch.bool, device=device)
        for segment in segments:
            mask[segment.start : segment.stop, : segment.prefix_stop] = True
            width = segment.stop - segment.start
            mask[segment.start : segment.stop, segment.start : segment.stop] = torch.ones(
                width, width, dtype=torch.bool, device=device
            ).tril()
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(1, heads, start, 128) for heads in (16, 8, 8, 16)]
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        *inputs, gradient = (torch.randn(shape, generator=generator, device=device).to(half) for shape in shapes)
        ours = [tensor.clone().requires_grad_() for tensor in inputs]
        output, _ = packed_attention(
            torch.nn.Identity(), *ours, None, scaling=128**-0.5, row_layout=RowLayout(segments, device)
        )
        output.transpose(1, 2).backward(gradient)
        exact = [tensor.float().requires_grad_() for tensor in inputs]
        expected = scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
        expected.backward(gradient.float())
        pairs = [("output", output.transpose(1, 2), expected)]
        pairs += [(f"gradient of {n}", o.grad, e.grad) for n, o, e in zip("qkv", ours, exact, strict=True)]
        for what, found, right in pairs:
            error, largest = (found.float() - right).abs().max(), right.abs().max()
            lines.append(f"| {name} | {what} | {error:.1e} | {largest:.1f} |")
    return "\n".join(lines)


def make_groups(model: Path, arguments: argparse.Namespace) -> list[TrainGroup]:
    """Make groups of eight responses of long-tailed lengths to a random picture each."""
    rng = np.random.default_rng(0)
    side = arguments.image_side
    num_placeholders = side * side // 4
    image_id = image_token_id(model)
    groups = []
    for index in range(arguments.groups):
        pixels = torch.from_numpy(rng.standard_normal((side * side, 3 * 2 * 16 * 16), dtype=np.float32))
        image = ImagePatches(pixel_values_PD=pixels, grid_thw=(1, side, side), num_placeholders=num_placeholders)
        prompt = [*rng.integers(0, 256, 10), *[image_id] * num_placeholders, *rng.integers(0, 256, 50)]
        longest = arguments.max_response
        lengths = (rng.lognormal(np.log(longest / 3), 0.6, 8).clip(longest // 15, longest)).astype(int)
        groups.append(
            TrainGroup(
                index=index,
                attempt=0,
                oldest_version=1,
                samples=tuple((_sample(prompt, rng.integers(0, 256, n).tolist(), image, image_id),) for n in lengths),
                rewards=REWARDS,
            )
        )
    return groups


def _sample(prompt: Sequence[int], own: Sequence[int], image: ImagePatches, image_id: int | None) -> TrainSequence:
    ids = np.array([*prompt, *own])
    mask = np.arange(len(ids)) >= len(prompt)
    return TrainSequence(
        token_ids_X=ids,
        loss_mask_X=mask,
        engine_logprobs_X=np.where(mask, -11.0, 0).astype(np.float32),
        versions_X=np.where(mask, 1, -1),
        image_mask_X=ids == image_id,
        images=(image,),
    )


def backend_of(model: Path, arguments: argparse.Namespace, **changes: Any) -> InProcessBackend:
    """Load the trainer's own backend."""
    config = BackendConfig(device="cpu" if arguments.cpu else "cuda", **changes)
    backend = InProcessBackend(model, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    return backend


def logprobs_table(model: Path, groups: Sequence[TrainGroup], arguments: argparse.Namespace) -> str:
    """Compare log-probabilities of the first group with those of one sample at a time in float32."""
    sequences = list(groups[0].sequences)
    device = torch.device("cpu" if arguments.cpu else "cuda")
    policy = backend_of(model, arguments).policy
    forbidden_ids = forbidden_token_ids(model)
    reference = PaddedPolicy.load(model, temperature=1.0, forbidden_ids=forbidden_ids, device=device)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        exact = torch.cat([reference.logprobs([sequence]) for sequence in sequences])
        with torch.autocast(device.type, torch.bfloat16, enabled=not arguments.cpu):
            found["padded, transformers' attention"] = reference.logprobs(sequences)
            for name, share in (("packed rows", False), ("group rows", True)):
                rows = pack(sequences, [0] * 8, range(8), max_tokens=16384, share_prompts=share)
                values: dict[int, torch.Tensor] = {}
                for row in (build_row(sequences, plan).to(device) for plan in rows):
                    logprobs_N = policy(row).logprobs_N
                    values |= {int(n): logprobs_N[row.sample_N == n] for n in row.sample_N.unique()}
                found[name] = torch.cat([values[number] for number in sorted(values)])
    lines = ["| log-probabilities | mean error | largest error |", "|---|---|---|"]
    lines += [
        f"| {name} | {(logprobs - exact).abs().mean():.1e} | {(logprobs - exact).abs().max():.1e} |"
        for name, logprobs in found.items()
    ]
    return "\n".join(lines)


def steps_table(model: Path, groups: Sequence[TrainGroup], arguments: argparse.Namespace) -> tuple[str, float]:
    """Measure whole optimizer steps; return the table, and the best MFU of those with group rows.

    The MFU is 0 if the GPU's peak is unknown.
    """
    best_mfu = 0.0
    lines = [
        "| rows | most tokens | activations | layers | s/step (range) | tokens of samples/s | computed tokens/s | MFU "
        "| peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sequences = [sequence for group in groups for sequence in group.sequences]
    group_of = [number for number, group in enumerate(groups) for _ in group.sequences]
    num_inputs = [sequence.num_inputs for sequence in sequences]
    for shares, recomputes, compiles, most_tokens in [STEPS[number] for number in arguments.rows]:
        rows = pack(sequences, group_of, range(len(sequences)), max_tokens=most_tokens, share_prompts=shares)
        num_computed = sum(num_row_tokens(row, num_inputs) for row in rows)
        name = (
            f"{len(rows)} {'group' if shares else 'packed'} | {most_tokens:,} "
            f"| {'recomputed' if recomputes else 'kept'} | {'compiled' if compiles else 'as they are'}"
        )
        settings = {
            "share_prompts": shares,
            "gradient_checkpointing": recomputes,
            "compile": compiles,
            "micro_batch_tokens": most_tokens,
        }
        try:
            seconds, memory, flops, spent = _step(model, groups, rows, sequences, arguments, settings)
        except torch.OutOfMemoryError:
            lines.append(f"| {name} | does not fit | | | | |")
            continue
        median = statistics.median(seconds)
        mfu = flops / median / arguments.peak_tflops / 1e12 if arguments.peak_tflops else 0.0
        if shares:
            best_mfu = max(best_mfu, mfu)
        lines.append(
            f"| {name} | {median:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {sum(num_inputs) / median:,.0f} "
            f"| {num_computed / median:,.0f} | {f'{mfu:.1%}' if mfu else '-'} | {memory} |"
        )
        sys.stderr.write(f"{lines[-1]}\n{spent}")
    return "\n".join(lines), best_mfu


def _step(
    model: Path,
    groups: Sequence[TrainGroup],
    rows: Sequence[Any],
    sequences: Sequence[TrainSequence],
    arguments: argparse.Namespace,
    settings: Mapping[str, Any],
) -> tuple[list[float], str, float, str]:
    """Return the seconds of each step, the peak memory, a step's floating-point operations, and what the GPU did."""
    backend = backend_of(model, arguments, **settings)
    started = time.perf_counter()
    take_step(backend, [groups], 1)  # compiles and allocates at first use
    first_s = time.perf_counter() - started
    if not arguments.cpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        take_step(backend, [groups], 1)
        if not arguments.cpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    memory = "-" if arguments.cpu else f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    spent = f"  the first step {first_s:.1f} s; {_spent(backend, groups, arguments)}" if arguments.profile else ""
    flops = model_flops(backend.policy.model).of(ProductCounts.of(rows, sequences), with_gradient=True)
    return seconds, memory, flops, spent


def _spent(backend: InProcessBackend, groups: Sequence[TrainGroup], arguments: argparse.Namespace) -> str:
    """Return the seconds of a step that the device spends on each kind of work and on the kernels that take most, how
    many kernels that is, for how long it waits, and where the host waits for it.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = not arguments.cpu
    activity, device = (ProfilerActivity.CUDA, DeviceType.CUDA) if on_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity]) as profiled:
        started = time.perf_counter()
        take_step(backend, [groups], 1)
        if on_gpu:
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - started
    if arguments.trace:
        profiled.export_chrome_trace(str(arguments.trace))
    seconds: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    of_kernel: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == device:
            kind = next(kind for kind, names in KERNELS if names.search(event.name))
            spent_s = (event.device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
            seconds[kind] += spent_s
            numbers[kind] += 1
            of_kernel[event.name[:100]] += spent_s
    parts = [f"{kind} {seconds[kind]:.3f} s in {numbers[kind]:,}" for kind, _ in KERNELS if numbers[kind]]
    waits_s = max(0.0, elapsed_s - seconds.total())
    lines = [f"{', '.join(parts)}; the device waits {waits_s:.3f} of {elapsed_s:.3f} s"]
    lines += [f"    {spent_s:.4f} s {name}" for name, spent_s in of_kernel.most_common(MOST_KERNELS)]
    if on_gpu:
        lines += [f"    the host waits {number} times in {where}" for where, number in _waits(backend, groups)]
    return "\n".join(lines) + "\n"


def _waits(backend: InProcessBackend, groups: Sequence[TrainGroup]) -> list[tuple[str, int]]:
    """Return where and how often the host waits for the GPU in a step; the backward pass has no place of its own."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_step(backend, [groups], 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)
    )
    return places.most_common()


def main() -> int:
    """Measure and print tables; return 1 if the bar fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU, with a tiny model")
    parser.add_argument("--groups", type=int, default=0, help="of eight samples; 0: 16, with --cpu 2")
    parser.add_argument("--steps", type=int, default=0, help="measured after one that is not; 0: 5, with --cpu 1")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of the table's rows; all if left out")
    parser.add_argument("--only-steps", action="store_true", help="leave the first two tables out")
    parser.add_argument("--trace", type=Path, help="with --profile: file for a Chrome trace of the last row's step")
    parser.add_argument("--profile", action="store_true", help="say what the GPU does in each kind of step")
    parser.add_argument("--peak-tflops", type=float, default=0, help="of the GPU; 0: from its data sheet")
    arguments = parser.parse_args()
    arguments.rows = list(range(len(STEPS))) if arguments.rows is None else arguments.rows
    arguments.groups = arguments.groups or (2 if arguments.cpu else 16)
    arguments.steps = arguments.steps or (1 if arguments.cpu else 5)
    arguments.image_side, arguments.max_response = (6, 60) if arguments.cpu else (40, 1500)
    if not arguments.cpu and not torch.cuda.is_available():
        raise SystemExit("no GPU is seen; give --cpu for a dry run without one")
    device = torch.device("cpu" if arguments.cpu else "cuda")
    name = platform.machine() if arguments.cpu else torch.cuda.get_device_name(device)
    if not arguments.peak_tflops:
        arguments.peak_tflops = peak_tflops(device, torch.bfloat16) or 0.0
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    sys.stdout.write(f"{name}, {versions}\n\n")
    if not arguments.only_steps:
        sys.stdout.write(f"{attention_table(device)}\n\n")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, is_tiny=arguments.cpu, device=device)
        groups = make_groups(model, arguments)
        if not arguments.only_steps:
            sys.stdout.write(f"{logprobs_table(model, groups, arguments)}\n\n")
        table, mfu = steps_table(model, groups, arguments)
    sys.stdout.write(f"{table}\n")
    if arguments.cpu or not arguments.peak_tflops:
        return 0
    sys.stdout.write(f"\nbest MFU with group rows: {mfu:.1%} (bar: {LEAST_MFU:.0%})\n")
    return int(mfu < LEAST_MFU)


if __name__ == "__main__":
    sys.exit(main())
