"""OpenCL extensions for products of matrices or of bytes that flashmem does not use, and why.

NVIDIA's tensor cores are in `tensor_cores.py`, dot products of bytes in `dot_products.py`. The sources of the reasons are in
docs/research/phone-compilers.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

UNUSED: Mapping[str, str] = {
    "cl_arm_matrix_multiply": "its text is not public: which part of a matrix a work-item has is not specified",
    "cl_img_matrix_multiply": "no GPU that has it was ever seen here",
    "cl_intel_subgroup_matrix_multiply_accumulate": "no GPU that has it was ever seen here",
    "cl_khr_cooperative_matrix": "it has instructions of SPIR-V, and kernels here are OpenCL C",
    "cl_qcom_dot_product8": "its text is not public, and programs contradict each other about its signs",
    "cl_qcom_ml_ops": "it has operators of Qualcomm's library on its own tensors, and no functions for kernels",
}
"""The reason why each is unused."""


def unused_of(extensions: Collection[str]) -> dict[str, str]:
    """Those of `UNUSED` among a device's `extensions`."""
    return {name: reason for name, reason in UNUSED.items() if name in extensions}
