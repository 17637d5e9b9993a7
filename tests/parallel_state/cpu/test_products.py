"""Products of matrices with oneDNN: equal to PyTorch's own, and used only if they are faster."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from parallel_state.cpu import products

INTEL = "vendor_id : GenuineIntel\nflags : fpu avx2 avx512f\n"
AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f\n"
OLDER_AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2\n"

ROWS = 2048
PATCHED = """
import torch
from parallel_state.cpu import products

products.is_slow_processor = lambda: True
products.patch_products()
products.patch_products()
torch.manual_seed(0)
used = []
with_onednn = products._with_onednn
products._with_onednn = lambda left, right: used.append(tuple(left.shape)) or with_onednn(left, right)
rows, inside, out = 2048, 128, 256
tokens, weight = torch.randn(rows, inside, requires_grad=True), torch.randn(out, inside, requires_grad=True)
result = torch.nn.functional.linear(tokens, weight)
gradient = torch.randn(rows, out)
result.backward(gradient)
assert sorted(used) == [(out, rows), (rows, inside), (rows, out)], used
exact = [tensor.detach().double() for tensor in (tokens, weight, gradient)]
expected = exact[0] @ exact[1].t(), exact[2] @ exact[1], exact[2].t() @ exact[0]
for found, right in zip((result, tokens.grad, weight.grad), expected, strict=True):
    assert float((found.detach().double() - right).abs().max()) < 1e-6 * float(right.abs().max()) * inside**0.5
for wide in (tokens.detach(), gradient):
    narrow = gradient if wide is not gradient else tokens.detach()
    total = torch.ones(wide.size(1), narrow.size(1))
    products.add_product_of_transposed(total, wide, narrow)
    right = wide.double().t() @ narrow.double() + 1
    assert total.is_contiguous()
    assert float((total.double() - right).abs().max()) < 1e-6 * float(right.abs().max()) * 10
assert len(used) == 5 and used[3] == used[4] == (inside, rows), used
small = torch.randn(4, 8)
assert torch.allclose(small @ small.t(), (small[:, None] * small).sum(-1)) and len(used) == 5
assert (torch.randn(rows, inside).bfloat16() @ weight.detach().bfloat16().t()).dtype is torch.bfloat16
assert (torch.randn(0, 8) @ torch.randn(8, 3)).shape == (0, 3)
for wrong in (torch.randn(7, 4096), torch.randn(129, 4096).double()):
    try:
        tokens.detach() @ wrong
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    else:
        raise AssertionError(wrong.shape)
"""


@pytest.mark.parametrize(("information", "slow"), [(INTEL, False), (AMD, True), (OLDER_AMD, False), ("", False)])
def test_only_on_amds_processors_with_avx512(information: str, slow: bool) -> None:
    assert products.is_slow_processor(information) == (slow and torch.backends.mkldnn.is_available())


@pytest.mark.processes
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch is without oneDNN")
def test_large_products_and_their_gradients() -> None:
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mat1 and mat2") == 2, done.stdout
