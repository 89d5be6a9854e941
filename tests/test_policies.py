"""The table of precision recipes."""

import pytest
import torch

from syncbn_lab.errors import InputError
from syncbn_lab.policies import POLICIES, check_keep_batchnorm_fp32


def test_the_table_names_its_recipes_and_their_dtypes():
    assert list(POLICIES) == [
        "O0",
        "O1",
        "O2",
        "O3",
        "autocast-fp16",
        "autocast-bf16",
        "half",
        "bf16",
    ]
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert policy.kind in ("apex", "autocast", "cast")
        assert isinstance(getattr(torch, policy.dtype), torch.dtype)
        # What was reported, and what the recipe does by itself, are values it takes.
        assert policy.reported_keep in policy.keep_choices
        assert policy.own_keep in policy.keep_choices


def test_only_o3_was_reported_with_keep():
    assert {n: p.reported_keep for n, p in POLICIES.items() if p.reported_keep is not None} == {
        "O3": True
    }


@pytest.mark.parametrize("keep", [None, True, False])
def test_the_check_follows_the_table(keep):
    for name, policy in POLICIES.items():
        if keep in policy.keep_choices:
            check_keep_batchnorm_fp32(name, keep)
        else:
            with pytest.raises(InputError, match=rf"^keep_batchnorm_fp32={keep} .*\.$"):
                check_keep_batchnorm_fp32(name, keep)


def test_the_table_and_check_refuse_what_is_no_bool():
    # For every recipe the same sentence, also for those that take no keep at all.
    for name in POLICIES:
        with pytest.raises(
            InputError, match=r"^keep_batchnorm_fp32 is 'maybe'; allowed are True, "
        ):
            check_keep_batchnorm_fp32(name, "maybe")
