"""INT4 against the library that wrote the format, bit for bit."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize

from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels.int4 import dequantize_int4, pack_int4, unpack_int4

ARGS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)


def words(*values):
    return torch.tensor([[value - 2**32 if value >= 2**31 else value for value in values]], dtype=torch.int32)


def random_case(rows=24, columns=96, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-8, 8, (rows, columns), generator=generator)
    scale = (torch.rand(rows, columns // 32, generator=generator) * 0.1 + 1e-3).to(dtype)
    return values, scale


def test_worked_example_of_all_values():
    values = torch.arange(-8, 8)[None]
    packed = pack_int4(values)
    assert torch.equal(packed, words(0x76543210, 0xFEDCBA98))
    assert packed.tolist() == [[1985229328, -19088744]]
    assert packed.view(torch.uint8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack_int4(packed), values.int())


def test_worked_example_with_a_scale():
    packed = torch.cat([words(0x07AB6744), torch.zeros(1, 3, dtype=torch.int32)], dim=1)
    out = dequantize_int4(packed, torch.tensor([[0.28125]], dtype=torch.bfloat16), torch.bfloat16)
    expected = [-1.125, -1.125, -0.28125, -0.5625, 0.84375, 0.5625, -0.28125, -2.25]
    assert out[0, :8].tolist() == expected
    assert out[0, 8:].tolist() == [-2.25] * 24


@pytest.mark.parametrize(("nibble", "value"), [(0, -8), (8, 0), (15, 7)])
def test_nibbles_have_an_offset_of_8(nibble, value):
    assert unpack_int4(words(nibble * 0x11111111)).tolist() == [[value] * 8]


def test_pack_and_unpack_equal_the_library():
    values, _ = random_case()
    packed = pack_int4(values)
    assert torch.equal(packed, pack_to_int32(values.to(torch.int8), 4))
    assert torch.equal(unpack_int4(packed), unpack_from_int32(packed, 4, values.shape).int())


def test_the_same_bytes_read_as_words_give_the_same_matrix():
    values, _ = random_case()
    pairs = (values + 8).view(24, 48, 2)
    as_bytes = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    assert torch.equal(unpack_int4(as_bytes.view(torch.int32)), values.int())
    with pytest.raises(ShapeError, match="packed"):
        unpack_int4(as_bytes)


def test_transposing_before_unpacking_is_another_matrix():
    values, _ = random_case(rows=96)
    packed = pack_int4(values)
    wrong = unpack_int4(packed.t().contiguous().view(96, 12))
    assert not torch.equal(wrong, values.t().int())
    assert torch.equal(unpack_int4(packed).t(), values.t().int())


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantized_equals_the_library(scale_dtype):
    values, scale = random_case(dtype=scale_dtype)
    out = dequantize_int4(pack_int4(values), scale, scale_dtype)
    expected = dequantize(values.to(torch.int8), scale, torch.zeros_like(scale), ARGS)
    assert expected.dtype == scale_dtype
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantized_is_value_times_scale_exactly(dtype):
    values, scale = random_case()
    exact = values.double() * scale.double().repeat_interleave(32, dim=1)
    assert torch.equal(dequantize_int4(pack_int4(values), scale, dtype).double(), exact)


def test_leading_axes_are_kept():
    values, scale = random_case()
    packed, stack = pack_int4(values), (2, 3)
    many = dequantize_int4(packed.expand(*stack, -1, -1), scale.expand(*stack, -1, -1), torch.float32)
    assert many.shape == (2, 3, 24, 96)
    assert torch.equal(many[1, 2], dequantize_int4(packed, scale, torch.float32))


def test_wrong_arguments_are_named():
    values, scale = random_case()
    with pytest.raises(ArgumentError, match=r"values: expected -8 to 7, got -8 to 8"):
        pack_int4(torch.tensor([[8, -8, 0, 0, 0, 0, 0, 0]]))
    with pytest.raises(ShapeError, match="values"):
        pack_int4(values[:, :7])
    with pytest.raises(ShapeError, match="scale"):
        dequantize_int4(pack_int4(values), scale[:, :2], torch.float32)
    with pytest.raises(ShapeError, match="packed"):
        dequantize_int4(pack_int4(values)[:, :9], scale[:, :2], torch.float32)
