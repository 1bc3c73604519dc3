"""Describe GPUs that can be simulated, each figure with the document that it comes from.

NVIDIA's data sheets count memory in GiB and write GB. They list matmul rates with sparsity, which
is twice the dense rate; the rates here are dense ones with FP32 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch

from lightning_unitscale.arguments import check_choice

_GIB = 2**30
_MIB = 2**20
# torch, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: ":4096:2:16:8" before
# compute capability 9.0 (and on Blackwell up to torch 2.11), ":4096:8" on it.
_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
_HOPPER_CUBLAS_BYTES = 32 * _MIB


@dataclass(frozen=True)
class GPU:
    """A GPU, and the defaults of torch and of NVIDIA's libraries on it.

    Attributes:
        name: Name after ``"cuda:"``, such as ``"h100"``.
        title: The name in reports.
        memory_bytes: All of its memory. The driver and the CUDA context take a few hundred MiB.
        capability: Compute capability (SM version), which decides which kernels run.
        num_multiprocessors: Number of streaming multiprocessors.
        bytes_per_second: Bandwidth of its memory.
        host_bytes_per_second: Bandwidth of its link to the host in one direction.
        flops_per_second: Rate of matmuls in BF16, in FP16 on a GPU without BF16.
        shared_bytes: Shared memory that a thread block may opt in to.
        threads_per_multiprocessor: Threads that one streaming multiprocessor holds at once.
        cublas_workspace_bytes: Size of the workspace that torch gives each thread's cuBLAS handle,
            without ``CUBLAS_WORKSPACE_CONFIG``.
        cublaslt_workspace_bytes: The same for cublasLt, without ``CUBLASLT_WORKSPACE_SIZE``.
    """

    name: str
    title: str
    memory_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int
    bytes_per_second: float
    host_bytes_per_second: float
    flops_per_second: float
    shared_bytes: int
    threads_per_multiprocessor: int = 2048
    cublas_workspace_bytes: int = _CUBLAS_BYTES
    # torch, CublasHandlePool.cpp, parseCUDABlasLtWorkspaceSize: 1024 KiB (pytorch issue 73328).
    cublaslt_workspace_bytes: int = _MIB


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Shared memory per
# block: 64 KiB for 7.5, 163 for 8.0, 99 for 8.6 and 8.9, 227 for 9.0 and 10.0. Resident threads per
# multiprocessor: 1024 for 7.5, 1536 for 8.6 and 8.9, else 2048.
_SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


def _gpu(
    name: str,
    title: str,
    memory_gib: float,
    capability: tuple[int, int],
    num_multiprocessors: int,
    gigabytes_per_second: float,
    host_gigabytes_per_second: float,
    teraflops_per_second: float,
) -> GPU:
    is_hopper = capability == (9, 0)
    return GPU(
        name,
        title,
        int(memory_gib * _GIB),
        capability,
        num_multiprocessors,
        gigabytes_per_second * 1e9,
        host_gigabytes_per_second * 1e9,
        teraflops_per_second * 1e12,
        _SHARED_KIB[capability] * 1024,
        _THREADS.get(capability, 2048),
        _HOPPER_CUBLAS_BYTES if is_hopper else _CUBLAS_BYTES,
    )


# The link to the host: PCI Express with 16 lanes, whose base specification gives 15.8 GB/s in one
# direction for revision 3.0, 31.5 for 4.0 and 63.0 for 5.0. The data sheets below round them up and
# name the revision: 5.0 for H100, H200 and B200, 3.0 for T4, 4.0 for the others.
_LISTED = (
    # "NVIDIA H100 Tensor Core GPU" data sheet, column SXM: 80 GB, 3.35 TB/s, BF16 1979 TFLOPS with
    # sparsity. "NVIDIA H100 Tensor Core GPU Architecture" white paper: 132 SMs, capability 9.0.
    _gpu("h100", "H100 80GB", 80, (9, 0), 132, 3350, 64, 989.5),
    # "NVIDIA A100 Tensor Core GPU" data sheet, column 80GB SXM: 2039 GB/s, BF16 312 TFLOPS.
    # "NVIDIA A100 Tensor Core GPU Architecture" white paper: 108 SMs, capability 8.0.
    _gpu("a100", "A100 80GB", 80, (8, 0), 108, 2039, 32, 312),
    # "NVIDIA H200 Tensor Core GPU" data sheet, column SXM: 141 GB (decimal), 4.8 TB/s, BF16 1979
    # TFLOPS with sparsity; the chip is the H100's.
    _gpu("h200", "H200 141GB", 141e9 / _GIB, (9, 0), 132, 4800, 64, 989.5),
    # "NVIDIA DGX B200" data sheet, 8 GPUs: 1,440 GB and 64 TB/s, 36 PFLOPS FP16/BF16 with sparsity.
    # CUDA's table of compute capabilities: 10.0. Its profile by cudaGetDeviceProperties: 148 SMs.
    _gpu("b200", "B200 180GB", 180e9 / _GIB, (10, 0), 148, 8000, 64, 2250),
    # "NVIDIA L40S" data sheet: 48 GB, 864 GB/s, BF16 362.05 TFLOPS, 18,176 cores in 142 SMs.
    _gpu("l40s", "L40S 48GB", 48, (8, 9), 142, 864, 32, 362.05),
    # "NVIDIA Ada GPU Architecture" white paper, appendix A, GeForce RTX 4090: 24 GB, 1008 GB/s,
    # BF16 165.2 TFLOPS with FP32 accumulation, 128 SMs; capability 8.9.
    _gpu("rtx4090", "RTX 4090 24GB", 24, (8, 9), 128, 1008, 32, 165.2),
    # Amazon's "EC2 G5 instances": A10G, 24 GB, 600 GB/s. "NVIDIA A10G" data sheet: BF16 70 TFLOPS,
    # 80 SMs; "NVIDIA Ampere GA102" white paper: capability 8.6.
    _gpu("a10g", "A10G 24GB", 24, (8, 6), 80, 600, 32, 70),
    # "NVIDIA T4" data sheet: 16 GB, 320 GB/s, FP16 65 TFLOPS. "NVIDIA Turing GPU Architecture"
    # white paper: 40 SMs, capability 7.5. It has no BF16.
    _gpu("t4", "T4 16GB", 16, (7, 5), 40, 320, 16, 65),
)
GPUS = {gpu.name: gpu for gpu in _LISTED}
"""GPUs by the name that follows ``"cuda:"``."""
DEFAULT_GPU = GPUS["h100"]
"""The GPU that ``"cuda"`` stands for on a machine without one."""
DeviceType = Literal[
    "cpu", "cuda", "cuda:h100", "cuda:a100", "cuda:h200", "cuda:b200", "cuda:l40s", "cuda:rtx4090",
    "cuda:a10g", "cuda:t4",
]  # fmt: skip
"""A profiled device, which this machine need not have. ``"cuda"`` is its GPU, else an H100."""
DEVICE_NAMES: tuple[DeviceType, ...] = get_args(DeviceType)
"""Every device that can be profiled."""
DEVICE_WORDS = (*DEVICE_NAMES, *GPUS)
"""Words for a device on the command line, where the name of a GPU is enough."""
_ADVICE = "choose the most similar of these"


def parse_device(device: str | torch.device) -> tuple[torch.device, GPU | None]:
    """Return the device type that tensors are on, and the GPU that is simulated.

    Raises:
        ValueError: If the device is unknown.
    """
    named = str(device) if isinstance(device, torch.device) else device
    check_choice("device", named, DEVICE_NAMES, "its kernels are not known", _ADVICE)
    kind, _, name = named.partition(":")
    if kind == "cpu":
        return torch.device("cpu"), None
    return torch.device("cuda"), GPUS[name] if name else present_gpu()


def name_with_type(name: str) -> DeviceType:
    """Return a device's name with its type: ``"cuda:h100"`` for ``"h100"``."""
    return cast(DeviceType, f"cuda:{name}" if name in GPUS else name)


def device_type(device: str) -> str:
    """Return the type of a device: ``"cuda"`` for ``"cuda:h100"``."""
    return device.partition(":")[0]


def present_gpu() -> GPU:
    """Return the first GPU of this machine, or an H100 if there is none."""
    if not torch.cuda.is_available():
        return DEFAULT_GPU
    properties = torch.cuda.get_device_properties(0)
    return describe_gpu(
        properties.name,
        (properties.major, properties.minor),
        properties.total_memory,
        properties.multi_processor_count,
    )


def describe_gpu(
    title: str, capability: tuple[int, int], memory_bytes: int, num_multiprocessors: int
) -> GPU:
    """Return the description of a GPU that CUDA reports."""
    # A GPU that is not listed has the speed of the listed one that is nearest in its compute
    # capability, and the kernels of its own.
    words = title.lower().replace("-", " ").replace("rtx ", "rtx").split()
    named = next((gpu for gpu in _LISTED if gpu.name in words), None)
    if named is not None and named.capability == capability:
        return replace(named, title=title, memory_bytes=memory_bytes)
    near = min(_LISTED, key=lambda gpu: abs(_number(gpu.capability) - _number(capability)))
    is_hopper = capability == (9, 0)
    return replace(
        near,
        name=title,
        title=title,
        memory_bytes=memory_bytes,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
        threads_per_multiprocessor=_THREADS.get(capability, 2048),
        cublas_workspace_bytes=_HOPPER_CUBLAS_BYTES if is_hopper else _CUBLAS_BYTES,
    )


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]
