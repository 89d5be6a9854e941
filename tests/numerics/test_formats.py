"""Ulp, unit roundoff and smallest subnormal, against torch.nextafter and the definitions."""

import math
import warnings

import pytest
import torch

from syncbn_lab.numerics.formats import dtype_name, smallest_subnormal, ulp, unit_roundoff

# Significant bits and exponent of the smallest normal number: IEEE 754, and bfloat16.
FORMATS = {
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
    torch.float64: (53, -1022),
}


def every_positive(dtype):
    """Every finite number >= 0 of a 16-bit dtype, in order."""
    numbers = torch.arange(0, 2**15, dtype=torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", FORMATS, ids=dtype_name)
def test_unit_roundoff_and_smallest_subnormal(dtype):
    bits, lowest = FORMATS[dtype]
    assert unit_roundoff(dtype) == 2.0**-bits
    assert smallest_subnormal(dtype) == math.ldexp(1.0, lowest - bits + 1)
    assert float(torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))) == (
        smallest_subnormal(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_ulp_of_every_16_bit_number(dtype):
    # Neighbours of the same dtype are one ulp apart: all binades, subnormals and zero.
    numbers = every_positive(dtype)
    gaps = numbers[1:].double() - numbers[:-1].double()
    torch.testing.assert_close(ulp(numbers[:-1], dtype), gaps, rtol=0, atol=0)
    torch.testing.assert_close(ulp(-numbers[:-1], dtype), gaps, rtol=0, atol=0)
    # The largest number has no finite neighbour above it, and the gap below is its own.
    assert float(ulp(numbers[-1:], dtype)) == float(gaps[-1])


@pytest.mark.parametrize("exponent", range(-150, 128, 7))  # subnormals, and up to the last binade
def test_ulp_over_binades_of_float32(exponent):
    # The binade's first number, two within it and, below the next binade, its last.
    start = torch.tensor(2.0**exponent, dtype=torch.float64)
    values = (start * torch.tensor([1, 1.25, 1.75, 2], dtype=torch.float64)).float()
    values[-1] = torch.nextafter(values[-1], torch.zeros(()))
    above = torch.nextafter(values, torch.full((), torch.inf))
    torch.testing.assert_close(
        ulp(values, torch.float32), above.double() - values.double(), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(0.0, id="zero"),
        pytest.param(5e-324, id="smallest subnormal"),
        pytest.param(2.0**-1022, id="smallest normal"),
        pytest.param(1.0, id="one"),
        pytest.param(math.nextafter(2.0, 0.0), id="last of a binade"),
        pytest.param(2.0**200, id="beyond float32"),  # a power of two made in float32 overflows
        pytest.param(2.0**-200, id="below float32"),
        pytest.param(1.7976931348623157e308, id="largest"),
    ],
)
def test_ulp_of_float64_is_python_s(value):
    assert float(ulp(torch.tensor(value, dtype=torch.float64), torch.float64)) == math.ulp(value)


def test_ulp_at_a_value_of_another_dtype():
    # The ulp of a coarse dtype at a number between its own: that of the binade it lies in.
    values = torch.tensor([1.0, 1.9999999, 2.0, 1e-9], dtype=torch.float64)
    expected = torch.tensor([2.0**-10, 2.0**-10, 2.0**-9, 2.0**-24], dtype=torch.float64)
    assert torch.equal(ulp(values, torch.float16), expected)


def test_ulp_keeps_the_shape_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ulp(torch.ones(2, 3, 1), torch.float32).shape == (2, 3, 1)
