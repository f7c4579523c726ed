"""What is chosen for whom, and why something is not."""

import dataclasses

import pytest

from areal_jax.config import ConfigError
from areal_jax.models import forms

ROWS = forms.Rows(
    platform='cpu',
    queries=4096,
    keys=4096,
    heads=12,
    head_size=128,
    dtype='bfloat16',
)
PAGES = forms.Pages(
    platform='tpu', page=64, heads=12, kv_heads=2, head_size=128
)


def of_rows(**changes):
  return forms.of_rows('auto', dataclasses.replace(ROWS, **changes))


def of_pages(**changes):
  return forms.of_pages('auto', dataclasses.replace(PAGES, **changes))


@pytest.mark.parametrize(
    'wanted, changes',
    [
        # Long rows on a CPU; short ones by whether heads are few and whole.
        ('blockwise', dict()),
        ('by_head', dict(queries=192, keys=192)),
        ('grouped', dict(queries=192, keys=192, head_parts=2)),
        ('grouped', dict(queries=192, keys=192, heads=32)),
        ('blockwise', dict(queries=256, keys=256)),
        ('grouped', dict(platform='tpu', queries=1000, keys=1000)),
        ('splash', dict(platform='tpu')),
        ('splash', dict(platform='tpu', window=True, cap=True)),
        ('splash', dict(platform='tpu', queries=1024, whole=False)),
        ('blockwise', dict(platform='tpu', queries=4000)),
        ('blockwise', dict(platform='tpu', head_size=80)),
        ('grouped', dict(platform='tpu', queries=100, keys=100)),
        ('triton', dict(platform='gpu')),
        ('cudnn', dict(platform='gpu', segments=False)),
        ('cudnn', dict(platform='gpu', segments=False, window=True)),
        ('blockwise', dict(platform='gpu', window=True)),
        ('blockwise', dict(platform='gpu', cap=True)),
        ('blockwise', dict(platform='gpu', dtype='float32')),
        ('blockwise', dict(platform='gpu', queries=1024, whole=False)),
    ],
)
def test_the_form_of_rows(wanted, changes):
  assert of_rows(**changes) == wanted


@pytest.mark.parametrize(
    'wanted, changes',
    [
        ('mosaic', dict()),
        ('mosaic', dict(parts=2)),
        ('mosaic', dict(dtype='bfloat16', flat=True)),
        # One key/value head cannot be on two devices.
        ('gathered', dict(parts=4)),
        ('mosaic', dict(head_size=64)),
        ('gathered', dict(head_size=64, parts=2)),
        ('gathered', dict(page=20)),
        ('gathered', dict(flat=False)),
        ('triton', dict(platform='gpu')),
        ('gathered', dict(platform='gpu', page=48)),
        ('gathered', dict(platform='cpu')),
    ],
)
def test_the_form_of_pages(wanted, changes):
  assert of_pages(**changes) == wanted


@pytest.mark.parametrize(
    'form, changes, wanted',
    [
        ('splash', dict(queries=100), 'multiples of 128'),
        ('triton', dict(window=True), 'no window'),
        ('cudnn', dict(segments=False), 'a GPU'),
        ('flash', dict(), r"attention.rows is 'flash', wanted one of"),
    ],
)
def test_a_form_that_cannot_serve_is_refused_with_the_reason(
    form, changes, wanted
):
  with pytest.raises(ConfigError, match=wanted):
    forms.of_rows(form, dataclasses.replace(ROWS, **changes))


def test_a_form_that_is_asked_for_by_name_is_taken():
  assert forms.of_rows('grouped', ROWS) == 'grouped'
  assert forms.of_pages('gathered', PAGES) == 'gathered'
  with pytest.raises(ConfigError, match='attention.pages .* 4 devices'):
    forms.of_pages('mosaic', dataclasses.replace(PAGES, parts=4))
