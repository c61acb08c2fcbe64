"""What can be wrong with an argument of a kernel, and that it is refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from cases import same_bits


def gaps(tensor):
    """The same values, every second element."""
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def shorter(tensor):
    return tensor[..., :-1].contiguous()


def flat(tensor):
    return tensor.flatten(0, 1)


def elsewhere(tensor):
    return tensor.to("meta")


def few_slots(tensor):
    return tensor[:, :3].contiguous()


def three_heads(tensor):
    """Or groups."""
    return tensor.repeat(1, 2, 1, 1)[:, :3].contiguous()


def cast(dtype):
    function = lambda tensor: tensor.to(dtype)  # noqa: E731
    function.__name__ = str(dtype)
    return function


def named(cases):
    """Parameters of a test: (function, argument, what is wrong with it, the error's message)."""
    return [pytest.param(*case, id="-".join([case[0].__name__, case[1], case[2].__name__])) for case in cases]


def refuses(a, function, name, change, message):
    """`function` of the arguments `a` by name, one of them changed, raises and changes nothing."""
    a[name] = change(a[name])
    before = {key: value.clone() for key, value in a.items() if value.device.type != "meta"}
    with pytest.raises(ValueError, match=message):
        function(a)
    assert all(same_bits(value, a[key]) for key, value in before.items())


def copy(all_):
    return {name: tensor.clone() for name, tensor in all_.items()}


def assert_same(a, b):
    assert a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
