"""Costs read from the text of a module, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

from areal_jax.compile_check import hlo

# One layer of a scan over 3, as XLA writes it: a slice of stacked weights, a
# product, a sum over 4 devices, and an update in place of what is collected.
SCANNED = """\
HloModule jit_step, entry_computation_layout={(f32[8,16]{1,0})->f32[8,16]{1,0}}

%add.1 (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%x.1, %y.1)
}

%sliced (param_0: bf16[3,16,16], param_1: s32[]) -> bf16[16,16] {
  %param_0 = bf16[3,16,16]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,16,16]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,16,16}
  ROOT %flat = bf16[16,16]{1,0} bitcast(%cut)
}

%put (param_0: f32[3,8,16], param_1: f32[8,16], param_2: s32[]) -> f32[3,8,16] {
  %param_0 = f32[3,8,16]{2,1,0} parameter(0)
  %param_1 = f32[8,16]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,8,16]{2,1,0} bitcast(%param_1)
  ROOT %all = f32[3,8,16]{2,1,0} dynamic-update-slice(%param_0, %row, %param_2, %zero, %zero)
}

%body (carry: (s32[], f32[8,16], bf16[3,16,16], f32[3,8,16])) -> (s32[], f32[8,16], bf16[3,16,16], f32[3,8,16]) {
  %carry = (s32[], f32[8,16]{1,0}, bf16[3,16,16]{2,1,0}, f32[3,8,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[3,16,16]{2,1,0} get-tuple-element(%carry), index=2
  %ys = f32[3,8,16]{2,1,0} get-tuple-element(%carry), index=3
  %own = bf16[16,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%sliced
  %y = f32[8,16]{1,0} dot(%x, %own), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[8,16]{1,0} all-reduce(%y), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add.1
  %kept = f32[3,8,16]{2,1,0} fusion(%ys, %sum, %i), kind=kLoop, calls=%put
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8,16]{1,0}, bf16[3,16,16]{2,1,0}, f32[3,8,16]{2,1,0}) tuple(%next, %sum, %w, %kept)
}

%more (carry: (s32[], f32[8,16], bf16[3,16,16], f32[3,8,16])) -> pred[] {
  %carry = (s32[], f32[8,16]{1,0}, bf16[3,16,16]{2,1,0}, f32[3,8,16]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[8,16], bf16[3,16,16], f32[3,8,16])) -> f32[8,16] {
  %a = (s32[], f32[8,16]{1,0}, bf16[3,16,16]{2,1,0}, f32[3,8,16]{2,1,0}) parameter(0)
  %loop = (s32[], f32[8,16]{1,0}, bf16[3,16,16]{2,1,0}, f32[3,8,16]{2,1,0}) while(%a), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %x.2 = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_loop_counts_as_often_as_it_turns():
  found = hlo.cost(SCANNED)
  assert found.flops == 3 * 2 * 8 * 16 * 16
  assert found.unknown_loops == 0
  assert found.arguments == 4 + 8 * 16 * 4 + 3 * 16 * 16 * 2 + 3 * 8 * 16 * 4


@pytest.mark.parametrize(
    'last, step, turns',
    [(3, 1, 3), (8, 2, 4), (7, 2, 4)],
    ids=['by one', 'unrolled', 'unrolled with a rest'],
)
def test_a_condition_tells_how_often_a_loop_turns(last, step, turns):
  text = SCANNED.replace('"known_trip_count":{"n":"3"},', '')
  text = text.replace(
      '%one = s32[] constant(1)', f'%one = s32[] constant({step})'
  )
  text = text.replace(
      '  ROOT %yes = pred[] constant(true)\n',
      '  %i.1 = s32[] get-tuple-element(%carry), index=0\n'
      f'  %last = s32[] constant({last})\n'
      '  ROOT %yes = pred[] compare(%i.1, %last), direction=LT\n',
  )
  found = hlo.cost(text)
  assert (found.flops, found.unknown_loops) == (turns * 2 * 8 * 16 * 16, 0)


def test_a_slice_of_a_stack_costs_the_slice_and_not_the_stack():
  row, weights, index = 8 * 16 * 4, 16 * 16 * 2, 4
  a_turn = (
      (weights + index + weights)  # cut out of the stack
      + (row + weights + row)  # the product
      + (row + row)  # the sum over devices
      + (row + index + row)  # put into what is collected
      + 3 * index  # i + 1
  )
  assert hlo.cost(SCANNED).bytes == 3 * a_turn


def test_collectives_are_summed_by_kind_and_group():
  (found,) = hlo.cost(SCANNED).collectives
  size = 8 * 16 * 4
  assert found == hlo.Collective(
      'all-reduce', 4, 3, 3 * size, 3 * 2 * size * 3 / 4
  )


def test_a_loop_of_unknown_length_counts_once_and_is_told():
  text = SCANNED.replace('"known_trip_count":{"n":"3"},', '')
  found = hlo.cost(text)
  assert (found.flops, found.unknown_loops) == (2 * 8 * 16 * 16, 1)


def test_what_lies_in_fast_memory_is_free():
  fast = SCANNED.replace(
      '%own = bf16[16,16]{1,0}', '%own = bf16[16,16]{1,0:T(8,128)(2,1)S(1)}'
  )
  # Neither written by the slice nor read by the product.
  less = 3 * 2 * (16 * 16 * 2)
  assert hlo.cost(SCANNED).bytes - hlo.cost(fast).bytes == less


@pytest.mark.parametrize(
    'line, wanted',
    [
        (
            'f32[32,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}},'
            ' dimensions={0}',
            ('all-gather', 4, 512, 384),
        ),
        (
            'f32[2,4]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4],'
            ' dimensions={0}, to_apply=%add',
            ('reduce-scatter', 4, 128, 96),
        ),
        (
            '(f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%p),'
            ' replica_groups={{0,1},{2,3}}, dimensions={0}',
            ('all-gather', 2, 256, 128),
        ),
        (
            'f32[8,4]{1,0} collective-permute(%p),'
            ' source_target_pairs={{0,1},{1,0}}',
            ('collective-permute', 2, 128, 128),
        ),
        (
            "f32[32,4]{1,0} all-gather(%p), replica_groups=mesh['axis_0'=2,"
            "'axis_1'=4] {'axis_1'}, dimensions={0}",
            ('all-gather', 4, 512, 384),
        ),
        (
            "f32[32,4]{1,0} all-gather(%p), replica_groups=mesh['axis_0'=8]"
            " {'axis_0':(2)4}, dimensions={0}",
            ('all-gather', 4, 512, 384),
        ),
    ],
)
def test_each_kind_sends_its_share_of_a_ring(line, wanted):
  text = (
      'ENTRY %main (p: f32[8,4]) -> f32[8,4] {\n'
      '  %p = f32[8,4]{1,0} parameter(0)\n'
      f'  ROOT %out = {line}\n'
      '}\n'
  )
  (found,) = hlo.cost(text).collectives
  assert (found.kind, found.group, found.bytes, found.sent) == wanted
  assert found.count == 1


@pytest.mark.parametrize(
    'shapes, attributes, wanted',
    [
        # A product [64, 32] · [32, 16] as TPUs have it.
        (('64,32', '32,16', '64,16'), 'dim_labels=bf_io->bf', 64 * 32 * 16),
        # Four products [8, 32] · [32, 16], the batch as a dimension of space.
        (
            ('4,8,32', '4,32,16', '4,8,16'),
            'window={size=4 stride=3 pad=0_0 lhs_dilate=4},'
            ' dim_labels=0bf_0io->0bf',
            4 * 8 * 32 * 16,
        ),
        # A convolution over 10 positions with a kernel of 3, padded to 10: the
        # first and the last output see two of them.
        (
            ('2,10,3', '3,3,5', '2,10,5'),
            'window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f',
            (3 * 10 - 2) * 2 * 3 * 5,
        ),
    ],
    ids=['product', 'batched', 'padded'],
)
def test_a_convolution_counts_the_positions_that_meet(
    shapes, attributes, wanted
):
  left, right, result = (f'f32[{shape}]{{}}' for shape in shapes)
  text = (
      f'ENTRY %main (a: {left}, b: {right}) -> {result} {{\n'
      f'  %a = {left} parameter(0)\n'
      f'  %b = {right} parameter(1)\n'
      f'  ROOT %out = {result} convolution(%a, %b), {attributes}\n'
      '}\n'
  )
  assert hlo.cost(text).flops == 2 * wanted


def test_of_branches_the_dearest_counts():
  text = (
      '%cheap (p: f32[8,8]) -> f32[8,8] {\n'
      '  ROOT %p = f32[8,8]{1,0} parameter(0)\n'
      '}\n'
      '%dear (q: f32[8,8]) -> f32[8,8] {\n'
      '  %q = f32[8,8]{1,0} parameter(0)\n'
      '  ROOT %d = f32[8,8]{1,0} dot(%q, %q), lhs_contracting_dims={1},'
      ' rhs_contracting_dims={0}\n'
      '}\n'
      'ENTRY %main (a: f32[8,8], which: pred[]) -> f32[8,8] {\n'
      '  %a = f32[8,8]{1,0} parameter(0)\n'
      '  %which = pred[] parameter(1)\n'
      '  ROOT %out = f32[8,8]{1,0} conditional(%which, %a, %a),'
      ' true_computation=%dear, false_computation=%cheap\n'
      '}\n'
  )
  assert hlo.cost(text).flops == 2 * 8**3


def test_a_kernel_is_named_and_costs_nothing_here():
  text = (
      'ENTRY %main (a: bf16[8,8]) -> bf16[8,8] {\n'
      '  %a = bf16[8,8]{1,0} parameter(0)\n'
      '  ROOT %out = bf16[8,8]{1,0} custom-call(%a),'
      ' custom_call_target="tpu_custom_call"\n'
      '}\n'
  )
  found = hlo.cost(text)
  assert found.kernels == {'tpu_custom_call': 1}
  assert found.bytes == found.flops == 0


def test_a_collective_that_is_split_over_fusions_counts_once():
  text = (
      '%part (p: f32[8,4]) -> f32[16,4] {\n'
      '  %p = f32[8,4]{1,0} parameter(0)\n'
      '  ROOT %g = f32[16,4]{1,0} all-gather(%p), channel_id=7,'
      ' replica_groups={{0,1}}, dimensions={0}\n'
      '}\n'
      'ENTRY %main (a: f32[8,4]) -> f32[16,4] {\n'
      '  %a = f32[8,4]{1,0} parameter(0)\n'
      '  %begun = f32[16,4]{1,0} fusion(%a), kind=kCustom, calls=%part\n'
      '  ROOT %done = f32[16,4]{1,0} fusion(%a), kind=kCustom, calls=%part\n'
      '}\n'
  )
  (found,) = hlo.cost(text).collectives
  assert (found.count, found.bytes) == (1, 16 * 4 * 4)


def test_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match='without an ENTRY'):
    hlo.cost('HloModule nothing\n')


def test_a_real_program_costs_what_its_shapes_say():
  mesh = jax.make_mesh((4,), ('x',), devices=jax.devices()[:4])
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def layers(x, weights):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0].sum()

  lowered = jax.jit(jax.grad(layers, 1), out_shardings=whole).lower(
      jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows),
      jax.ShapeDtypeStruct((5, 32, 32), jnp.float32, sharding=whole),
  )
  found = hlo.cost(lowered.compile().as_text())
  # Forward, and backward for weights and inputs: three products a layer, of 16
  # rows each. The gradient of the last layer's outputs is a constant.
  product = 2 * 16 * 32 * 32
  assert 2 * 5 * product <= found.flops <= 3 * 5 * product
  kinds = {each.kind for each in found.collectives}
  assert kinds == {'all-reduce'}
  assert sum(c.bytes for c in found.collectives) >= 5 * 32 * 32 * 4
