"""Small calls of attention for compute-sanitizer, see sanitized.py."""

from functools import partial

import torch

from kdlab.kernels import verify_attention_flashmla
from kdlab.kernels import verify_attention_wgmma as wgmma
from kdlab.kernels.verify_attention import verify_attention
from tests.kernels import test_draft_attention, verify_cases

BF16, F32 = torch.bfloat16, torch.float32


def draft_attention():
    """Blocks over contexts with and without several parts to merge."""
    for starts, window, past_is_old in (((3, 70), None, False), ((600,), None, True), ((200,), 100, True)):
        case = test_draft_attention.new_case(starts, dtype=BF16, window=window)
        on_gpu = test_draft_attention.Case(*(t.cuda() for t in case.tensors()), window, case.causal)
        on_gpu.run("cuda", past_is_old=past_is_old)


def verify(impl, prefixes, nodes, *, fixed=False, dtype=BF16):
    """Attention over these prefixes and trees, compared with float64."""
    case = verify_cases.make_case(prefixes, nodes, 8, device="cpu", dtype=dtype)
    o, _ = verify_attention(
        *(t.cuda() for t in case.tensors), scale=verify_cases.SCALE, latent_dim=512, impl=impl, fixed_split=fixed
    )
    torch.testing.assert_close(o.cpu().double(), case.expected()[0], rtol=1e-2, atol=2e-2)


def flashmla():
    """The merge with FlashMLA's result, whose own kernels are not for these tests to check."""

    class Package:
        """Stands for flash_mla: a prefix of zeros."""

        get_mla_metadata = staticmethod(lambda: (None,))

        @staticmethod
        def flash_mla_with_kvcache(q, *_, **options):
            streams, rows, heads, _ = q.shape
            return torch.zeros(streams, rows, heads, 512).to(BF16).cuda(), torch.zeros(streams, heads, rows).cuda()

    verify_attention_flashmla.load_flashmla = Package
    case = verify_cases.make_case([130, 0], [3, 2], 8, device="cpu")
    verify_attention(*(t.cuda() for t in case.tensors), scale=1.0, latent_dim=512, impl="flashmla")


def attention():
    """The draft's attention, and the target's by the kernels for every GPU."""
    draft_attention()
    verify("naive", [130, 0], [3, 2])
    verify("naive", [130, 0], [3, 2], dtype=F32)
    verify("mma", [130, 0], [3, 2])
    verify("mma", [700], [9])
    verify("mma", [1100], [2], fixed=True)
    flashmla()


def hopper():
    """The target's attention by the kernels for Hopper: a persistent grid, parts of tiles, and parts of the prefix."""
    most_parts = wgmma.most_parts
    for parts in (1, 3):
        wgmma.most_parts = partial(lambda parts, *_: parts, parts)
        verify("wgmma", [130, 0], [3, 2])
        verify("wgmma", [700], [9])
    wgmma.most_parts = most_parts
    verify("wgmma", [130], [2])  # blocks of 32 keys
    verify("wgmma", [700], [9], fixed=True)
