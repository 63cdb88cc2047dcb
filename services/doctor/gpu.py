"""Checks GPUs, and versions of CUDA's libraries that are known to be slow or broken with them."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.doctor.finding import Finding, fault, ok, warning
from services.launch.gpu_plan import GpuPlan

PROBE_TIMEOUT_S = 90.0
"""Seconds for the first import of torch from a slow disk, and a CUDA context on each GPU."""

_PROBE = """
import json, torch
def gpu(index):
    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return dict(name=name, capability=capability, free_bytes=free, total_bytes=total)
facts = dict(torch=torch.__version__, cuda=torch.version.cuda or "")
try:
    torch.cuda.init()
    facts["gpus"] = [gpu(index) for index in range(torch.cuda.device_count())]
    facts["cudnn"] = torch.backends.cudnn.version() or 0
    facts["nccl"] = list(torch.cuda.nccl.version())
except (RuntimeError, AssertionError, AttributeError) as error:
    facts["error"] = str(error).partition("\\n")[0]
print(json.dumps(facts))
"""
"""Runs in its own process: it may hang or die without effect here, and its memory is freed."""

_MIN_CUDNN = (9, 16)
_MAJORS = {"fa3": (8, 9), "trtllm_mha": (9, 10, 12)}
"""Attention back ends that SGLang refuses on other compute capabilities, by their majors: 8 is Ampere, 9 Hopper, 10 and
12 Blackwell."""
_MIN_MAJOR = 8
_MIN_SHARED_NCCL = (2, 30)
_ATTENTION_KEYS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "mm_attention_backend",
)


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper, (10, 0) and (12, 0) are Blackwell."""
    free_bytes: int
    total_bytes: int


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """torch's report on the GPUs that this process may use."""

    torch: str
    """torch's version."""
    cuda: str = ""
    """The CUDA version that torch was built for; empty for a build without CUDA."""
    gpus: tuple[Gpu, ...] = ()
    cudnn: int = 0
    """cuDNN's version in torch's form: 91600 is 9.16.0; 0 if there is none."""
    nccl: tuple[int, ...] = ()
    """NCCL's version, such as (2, 30, 4); empty if there is none."""
    error: str = ""
    """Why torch sees no GPU."""


def probe_gpus(*, timeout_s: float = PROBE_TIMEOUT_S) -> GpuFacts:
    """Ask torch for the GPUs, in a separate process.

    Raises:
        TimeoutError: the process did not answer in time.
        ValueError: torch could not be imported, or the process died.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"torch did not say within {timeout_s:g} s which GPUs it sees") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"torch cannot be imported: {last}")
    return msgspec.convert(json.loads(done.stdout), GpuFacts)


def check_gpus(devices: Sequence[str], facts: GpuFacts | None) -> Finding:
    """Check that torch sees the GPUs that the driver lists.

    Args:
        devices: As `find_gpus` returns them.
        facts: None if there are no devices, or torch is not installed.
    """
    if not devices:
        return ok("GPUs", "none can be used")
    if facts is None:
        return ok("GPUs", f"{len(devices)} ({', '.join(devices)})")
    if not facts.cuda:
        return fault(
            "GPUs", f"{len(devices)}, but torch {facts.torch} is a build without CUDA", "install torch for CUDA"
        )
    if len(facts.gpus) < len(devices):
        return fault(
            "GPUs",
            f"the driver shows {len(devices)}, and torch {facts.torch} sees {len(facts.gpus)}"
            f"{f': {facts.error}' if facts.error else ''}",
            f"install a driver for CUDA {facts.cuda}, or the torch that is built for your driver (`nvidia-smi` says "
            "which CUDA it supports); look at CUDA_VISIBLE_DEVICES",
        )
    names = ", ".join(f"{gpu.name} with {gpu.total_bytes / 2**30:.0f} GiB" for gpu in facts.gpus)
    return ok("GPUs", f"{len(facts.gpus)}: {names}")


def check_capability(facts: GpuFacts) -> Finding | None:
    """Check that the GPUs are new enough for the trainer's attention; None if they are."""
    old = [gpu for gpu in facts.gpus if gpu.capability[0] < _MIN_MAJOR]
    if not old:
        return None
    return fault(
        "compute capability",
        f"{old[0].name} has {old[0].capability[0]}.{old[0].capability[1]}, and flash attention and bfloat16 need 8.0",
        "use a GPU of the Ampere generation or younger; CUDA_VISIBLE_DEVICES chooses",
    )


def check_cudnn(facts: GpuFacts) -> Finding:
    """Check for cuDNN versions with which torch 2.9 is very slow at 3-D convolutions, Qwen-VL's patch embedding.

    Source: pytorch/pytorch issues 168167 and 174051, sgl-project/sglang pull request 14119.
    """
    if not facts.cudnn:
        return warning("cuDNN", "torch finds none", "install torch for CUDA again: its wheels bring cuDNN")
    version = (facts.cudnn // 10_000, facts.cudnn // 100 % 100)
    text = f"{version[0]}.{version[1]} with torch {facts.torch}"
    if facts.torch.startswith("2.9.") and version < _MIN_CUDNN:
        major = facts.cuda.partition(".")[0]
        return warning(
            "cuDNN",
            f"{text}: 3-D convolutions, which embed the pictures of Qwen-VL models, are 10 to 20 times slower and need "
            "much more memory",
            f"install torch 2.10 or younger; or torch 2.9.1 with `pip install 'nvidia-cudnn-cu{major}>=9.16'`",
        )
    return ok("cuDNN", text)


def check_attention(facts: GpuFacts, passed: Mapping[str, Any]) -> Finding | None:
    """Check that the attention back end that a recipe names runs on these GPUs; None if it names none.

    Args:
        facts: The GPUs.
        passed: [rollout.sglang].
    """
    named = {key: passed[key] for key in _ATTENTION_KEYS if key in passed}
    if not named:
        return None
    for key, backend in named.items():
        majors = _MAJORS.get(backend)
        unfit = [gpu for gpu in facts.gpus if majors is not None and gpu.capability[0] not in majors]
        if unfit:
            return fault(
                "attention",
                f"rollout.sglang.{key} = {backend!r} does not run on {unfit[0].name}",
                f"leave {key} out, and SGLang chooses; or set 'triton', which runs on all",
            )
    return ok("attention", ", ".join(f"{key} = {backend!r}" for key, backend in named.items()))


def check_nccl(facts: GpuFacts, plan: GpuPlan, transport: str) -> Finding:
    """Check that weights can be broadcast between GPUs, and on a GPU that trainer and engines share.

    Args:
        facts: The GPUs.
        plan: The GPUs of each process.
        transport: trainer.weight_sync.transport.
    """
    text = ".".join(map(str, facts.nccl))
    if transport not in ("auto", "broadcast"):
        return ok("NCCL", f"{text or 'none'}; transport {transport} does not need it")
    if not facts.nccl:
        return fault("NCCL", "torch has none", "install torch for CUDA, or set trainer.weight_sync.transport")
    if plan.is_shared and facts.nccl[:2] < _MIN_SHARED_NCCL:
        return fault(
            "NCCL",
            f"{text}: the trainer and the engines share a GPU, and only NCCL 2.30 and younger takes two members on one",
            "set trainer.weight_sync.transport = 'shared_memory', or install a torch with a younger NCCL",
        )
    return ok("NCCL", text)
