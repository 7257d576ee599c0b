"""Philox against the published known answers; Gumbel noise by its properties."""

import math

import pytest
import torch

from kdlab.kernels.philox import gumbel_noise, philox

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers_of_random123(counter, key, answer):
    words = philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in words) == answer


def noise(seed=7, streams=(0, 1), positions=((5, 6), (5, 6)), num_ids=37, **kwargs):
    return gumbel_noise(seed, torch.tensor(streams), torch.tensor(positions), num_ids, **kwargs)


def test_noise_depends_on_every_part_of_its_key():
    base = noise()
    assert not torch.equal(base, noise(seed=8))
    assert not torch.equal(base, noise(seed=7 + 2**32))
    assert not torch.equal(base[0], base[1])
    assert not torch.equal(base[:, 0], base[:, 1])
    assert torch.equal(base[0, 0], noise(streams=(0,), positions=((5,),))[0, 0])


@pytest.mark.parametrize("first_id", [0, 1, 2, 3, 4, 11, 36])
def test_a_shard_gets_the_noise_of_its_global_ids(first_id):
    assert torch.equal(noise(first_id=first_id, num_ids=37 - first_id), noise()[..., first_id:])


def test_noise_is_standard_gumbel():
    sample = noise(streams=(3,), positions=((11,),), num_ids=200_000).flatten()
    assert torch.isfinite(sample).all()
    assert abs(sample.mean() - 0.5772156649) < 0.01
    assert abs(sample.var() - math.pi**2 / 6) < 0.02
    assert abs((sample < 0).double().mean() - math.exp(-1)) < 0.005
