"""GPUs and what drives them, as `penstock doctor` judges them."""

import pytest

from services.doctor import gpu
from services.doctor.finding import Status
from services.doctor.gpu import Gpu
from tests.support.doctor import B200, H100, T4, assert_found, facts, plan, recipe


def test_gpus_that_torch_does_not_see() -> None:
    """The driver and torch disagree: the usual causes, each with its remedy."""
    assert_found(gpu.check_gpus([], None), Status.OK, "none can be used")
    assert_found(gpu.check_gpus(["0"], facts(H100)), Status.OK, "1: NVIDIA H100 with 80 GiB")
    assert_found(gpu.check_gpus(["0"], None), Status.OK, "1 (0)")
    assert_found(gpu.check_gpus(["0"], facts(cuda="")), Status.FAULT, "a build without CUDA", "install torch for CUDA")
    old_driver = facts(error="The NVIDIA driver on your system is too old (found version 12040)")
    assert_found(gpu.check_gpus(["0", "1"], old_driver), Status.FAULT, "too old", "a driver for CUDA 13.0")


def test_gpus_that_are_too_old() -> None:
    """Flash attention and bfloat16 begin with Ampere."""
    assert gpu.check_capability(facts(H100)) is None
    assert_found(gpu.check_capability(facts(H100, T4)), Status.FAULT, "Tesla T4 has 7.5")


@pytest.mark.parametrize(
    ("torch", "cudnn", "status"),
    [
        ("2.9.1+cu128", 91_002, "warning"),
        ("2.9.1+cu128", 91_501, "warning"),
        ("2.9.1+cu128", 91_600, "ok"),
        ("2.10.0+cu128", 91_002, "ok"),
        ("2.8.0+cu128", 91_002, "ok"),
        ("2.11.0+cu130", 0, "warning"),
    ],
)
def test_cudnn_with_which_pictures_are_slow(torch: str, cudnn: int, status: str) -> None:
    """torch 2.9 with cuDNN before 9.16."""
    found = gpu.check_cudnn(facts(H100, torch=torch, cudnn=cudnn, cuda="12.8"))
    assert_found(found, Status(status))
    assert ("nvidia-cudnn-cu12>=9.16" in found.remedy) == (status == "warning" and cudnn > 0)


@pytest.mark.parametrize(
    ("passed", "card", "status"),
    [
        ({"attention_backend": "fa3"}, B200, "fault"),
        ({"mm_attention_backend": "fa3"}, B200, "fault"),
        ({"attention_backend": "fa3"}, H100, "ok"),
        ({"decode_attention_backend": "trtllm_mha"}, B200, "ok"),
        ({"attention_backend": "triton"}, B200, "ok"),
    ],
)
def test_attention_back_ends(passed: dict[str, str], card: Gpu, status: str) -> None:
    """fa3 does not run on Blackwell."""
    assert_found(gpu.check_attention(facts(card), passed), Status(status), *passed)
    assert gpu.check_attention(facts(card), {"chunked_prefill_size": 64}) is None


def test_nccl_on_a_gpu_that_is_shared() -> None:
    """Only there, and only for broadcasts, must it be young."""
    shared = recipe("--rollout.gpu_memory_fraction=0.4")
    alone = plan(recipe(), 2)
    old = facts(H100, nccl=(2, 29, 3))
    found = gpu.check_nccl(old, plan(shared, 1), "auto")
    assert_found(found, Status.FAULT, "2.29.3", "transport = 'shared_memory'")
    assert_found(gpu.check_nccl(facts(H100), plan(shared, 1), "auto"), Status.OK, "2.30.4")
    assert_found(gpu.check_nccl(old, plan(shared, 1), "disk"), Status.OK)
    assert_found(gpu.check_nccl(old, alone, "broadcast"), Status.OK)
    assert_found(gpu.check_nccl(facts(H100, nccl=()), alone, "auto"), Status.FAULT, "torch has none")
