"""Fourier transforms and linear algebra: torch's own copies exactly, closed libraries within their error bars."""

import pytest
import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.rules import given_back

from .support import FAKE, ask, aten, context, cuda, extras

COMPLEX = torch.complex64


def test_short_smooth_transforms_need_no_work_area_but_might():
    # 64 rows of 1024: one kernel transforms lengths of 2, 3, 5 and 7 up to 4096; at most the signal itself
    found = ask(aten._fft_c2c.default, cuda(64, 1024, dtype=COMPLEX), [1], 0, True)
    assert found == Extras(error_bytes=64 * 1024 * 8)


def test_two_dimensional_transforms_take_their_signal_again():
    signal = 8 * 64 * 64 * 8
    found = ask(aten._fft_c2c.default, cuda(8, 64, 64, dtype=COMPLEX), [1, 2], 0, True)
    assert found == Extras(after=(signal, given_back(1)), error_bytes=signal, error_below_bytes=signal)


def test_prime_lengths_may_take_eight_times_the_signal():
    signal = 10 * 1009 * 8
    found = ask(aten._fft_c2c.default, cuda(10, 1009, dtype=COMPLEX), [1], 0, True)
    assert found is not None
    assert found.after == (signal, given_back(1))
    assert found.error_bytes == 7 * signal


def test_transforms_to_real_numbers_copy_their_input():
    found = ask(aten._fft_c2r.default, cuda(16, 513, dtype=COMPLEX), [1], 0, 1024)
    assert found is not None
    assert found.after[0] == 16 * 513 * 8


def test_transforms_of_the_first_two_dimensions_go_one_by_one():
    found = ask(aten._fft_r2c.default, cuda(32, 64), [0, 1], 0, True)
    assert found is not None
    assert found.after[0] == 32 * 33 * 8  # a second result


def test_batches_that_do_not_collapse_are_copied():
    with FAKE:
        strided = cuda(6, 4, 5, 256, dtype=COMPLEX)[:, :, ::2]
    found = ask(aten._fft_c2c.default, strided, [3], 0, True)
    assert found is not None
    assert found.after[0] == 6 * 4 * 3 * 256 * 8


def factored(op, *shape, **kwargs):
    source = cuda(*shape)
    with FAKE:
        outputs = op(source, **kwargs)
    return extras(op, (source,), kwargs, outputs, context())


def test_inverses_hold_factors_and_pivots():
    found = factored(aten.linalg_inv_ex.default, 4, 64, 64)
    assert found is not None
    assert found.after[:2] == (4 * 64 * 64 * 4, 4 * 64 * 4)
    assert found.after[2:] == (32, 32, 32)  # a batch of small matrices goes through pointers


def test_spectral_factorisations_overwrite_a_copy():
    singular = factored(aten._linalg_svd.default, 100, 50)
    assert singular is not None
    assert singular.after[:2] == (20_000, 4)
    assert singular.after[2] == (100 * 50 + 2 * 50 * 50) * 4
    assert singular.error_below_bytes == singular.after[2]
    values = factored(aten._linalg_svd.default, 100, 50, compute_uv=False)
    assert values is not None
    assert values.after[:4] == (20_000, 4, 20_000, 10_000)  # the vectors nobody wanted
    eigen = factored(aten._linalg_eigh.default, 3, 40, 40, UPLO="L", compute_v=False)
    assert eigen is not None
    assert eigen.after[:2] == (3 * 40 * 40 * 4, 12)


def test_reduced_factors_keep_the_reflectors():
    found = factored(aten.linalg_qr.default, 4, 64, 32)
    assert found is not None
    assert found.after[0] == 4 * 32 * 4
    only_r = factored(aten.linalg_qr.default, 4, 64, 32, mode="r")
    assert only_r is not None
    assert only_r.after[0] == 4 * 64 * 32 * 4


def test_matrix_exponentials_hold_powers_and_combinations():
    size = 3 * 20 * 20 * 4
    found = ask(aten.linalg_matrix_exp.default, cuda(3, 20, 20))
    assert found == Extras((5 * size, 5 * size, 2 * size), error_bytes=3 * size, error_below_bytes=6 * size)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0)])
def test_empty_matrices_need_nothing(shape):
    for op in (aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, aten.linalg_lu.default):
        assert factored(op, *shape) is None
