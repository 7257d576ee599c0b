"""embed_shard: the shards' summands add up to the embedding, bit for bit."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import embedding

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.embed_shard import embed_blocks, embed_shard
from tests.kernels.test_target_sample import DEVICES, gpu


def table(vocab, width, dtype, device):
    return torch.randn(vocab, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 128), (torch.bfloat16, 7168), (torch.bfloat16, 12)])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64, torch.uint8, torch.int16])
def test_shards_add_up_to_the_embedding(ids, dtype, width, device):
    weight = table(64, width, dtype, device)
    tokens = torch.tensor([[0, 15, 16, 17], [63, 48, 0, 31]], dtype=ids, device=device)
    shards = [embed_shard(tokens, part, first_id=16 * i) for i, part in enumerate(weight.split(16))]
    assert torch.equal(sum(shards), embedding(tokens.long(), weight))
    broken = [embed_shard(tokens, part, first_id=0) for part in weight.split(16)]
    assert not torch.equal(sum(broken), embedding(tokens.long(), weight))


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_of_no_shard_reads_nothing(device):
    weight = torch.full((4, 8), torch.nan, device=device)
    tokens = torch.tensor([-1, 3, 8, 2**31 - 1], dtype=torch.int32, device=device)
    assert torch.equal(embed_shard(tokens, weight, first_id=4), torch.zeros(4, 8, device=device))
    assert embed_shard(tokens[:0], weight, first_id=0).shape == (0, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_blocks_are_an_anchor_and_masks(ids, device):
    weight, anchor = table(64, 128, torch.bfloat16, device), torch.tensor([5, 63, 0], dtype=ids, device=device)
    block = torch.tensor([[5, 40, 40, 40], [63, 40, 40, 40], [0, 40, 40, 40]], device=device)
    for part, first in ((weight, 0), (weight[32:], 32), (weight[:32], 0)):
        got = embed_blocks(anchor, part, first_id=first, block_size=4, mask_id=40)
        assert torch.equal(got, embed_shard(block, part, first_id=first))
    assert embed_blocks(anchor, weight, first_id=0, block_size=1, mask_id=40).shape == (3, 1, 128)
    assert embed_blocks(anchor[:0], weight, first_id=0, block_size=4, mask_id=40).shape == (0, 4, 128)
    other = embed_blocks(anchor, weight, first_id=0, block_size=4, mask_id=41)
    assert not torch.equal(other, embed_shard(block, weight, first_id=0))


@gpu
@pytest.mark.parametrize("more", [(1, 0), (3, 2)])
def test_op_is_registered_as_torch_wants_it(more):
    arguments = torch.arange(4, device="cuda"), table(4, 8, torch.bfloat16, "cuda"), 1, *more
    torch.library.opcheck(torch.ops.kdlab.embed_shard.default, arguments)


def test_the_kernel_refuses_words_that_do_not_lie_whole_and_other_integers():
    with FakeTensorMode():
        values = torch.empty(1 + 8 * 64, dtype=torch.bfloat16, device="cuda")
        tokens, whole = torch.empty(3, dtype=torch.int64, device="cuda"), values.as_strided((8, 64), (64, 1))
        assert embed_shard(tokens, whole, first_id=0, impl="cuda").shape == (3, 64)
        with pytest.raises(ShapeError, match=r"weight: expected contiguous rows of whole 16-byte words.*offset 1"):
            embed_shard(tokens, values.as_strided((8, 64), (64, 1), 1), first_id=0, impl="cuda")
        with pytest.raises(ShapeError, match="tokens: expected int32 or int64 for impl='cuda', got"):
            embed_shard(torch.empty(3, dtype=torch.int16, device="cuda"), whole, first_id=0, impl="cuda")


@gpu
def test_a_table_that_begins_between_words_is_read_by_torch():
    values = table(1, 1 + 8 * 64, torch.bfloat16, "cuda")[0]
    tokens, odd = torch.tensor([7, 0, 9], device="cuda"), values[1:].view(8, 64)
    assert torch.equal(embed_shard(tokens, odd, first_id=0)[:2], odd[[7, 0]])
    with pytest.raises(ShapeError, match="16"):
        torch.ops.kdlab.embed_shard.default(tokens, odd, 0, 1, 0)


def test_bad_arguments_are_named():
    weight, tokens = torch.zeros(4, 8), torch.tensor([1])
    with pytest.raises(UnsupportedDevice, match="cuda"):
        embed_shard(tokens, weight, first_id=0, impl="cuda")
    with pytest.raises(ShapeError, match="weight"):
        embed_shard(tokens, weight[0], first_id=0)
    with pytest.raises(ShapeError, match="tokens"):
        embed_shard(tokens.float(), weight, first_id=0)
    with pytest.raises(ArgumentError, match="first_id"):
        embed_shard(tokens, weight, first_id=-1)
    with pytest.raises(ArgumentError, match="block_size"):
        embed_blocks(tokens, weight, first_id=0, block_size=0, mask_id=1)
    with pytest.raises(ShapeError, match="anchor"):
        embed_blocks(tokens[None], weight, first_id=0, block_size=2, mask_id=1)
