"""Publishing: equal tensor by tensor, on other meshes, safe from donation."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from areal_jax.mesh.rules import Rules
from areal_jax.models import lora, parameters
from areal_jax.models.config import LoraSettings
from areal_jax.telemetry.events import EventLog
from areal_jax.weights import Publisher, Target
from tests import tiny
from tests.limits import WAIT_S


def target(name, mesh, got):
  shardings = parameters.param_shardings(tiny.config(), mesh, Rules())
  return Target(
      name,
      shardings,
      lambda version, params, swapped: got.append((version, params, swapped)),
  )


def publisher(meshes, dtype=None):
  got = {f'engine/{i}': [] for i in range(len(meshes))}
  targets = [target(name, mesh, got[name]) for name, mesh in zip(got, meshes)]
  return Publisher(targets, events=EventLog(None), dtype=dtype), got


def test_replicas_hold_equal_tensors_after_resharding():
  source = tiny.params(0, on=tiny.mesh(4, 1))
  meshes = [tiny.mesh(1, 2, skip=4), tiny.mesh(1, 2, skip=6)]
  sender, got = publisher(meshes)
  sender.publish(3, source)
  for name, mesh in zip(got, meshes):
    version, params, _ = got[name][0]
    assert version == 3
    for sent, arrived in zip(jax.tree.leaves(source), jax.tree.leaves(params)):
      np.testing.assert_array_equal(np.asarray(sent), np.asarray(arrived))
      assert arrived.sharding.mesh == mesh


@pytest.mark.parametrize('dtype', [None, 'float32'])
@pytest.mark.parametrize('shape', [(1, 1), (4, 1)])
def test_published_weights_survive_the_donation_of_their_source(shape, dtype):
  mesh = tiny.mesh(*shape)
  source = jax.tree.map(jax.numpy.array, tiny.params(0, on=mesh))
  before = jax.tree.map(np.asarray, tiny.params(0))
  # Colocated: the same device, or two of the four.
  sender, got = publisher([tiny.mesh(1, min(2, mesh.size))], dtype)
  sender.publish(1, source)
  train = jax.jit(
      lambda p: jax.tree.map(lambda x: x * 0 - 7, p), donate_argnums=0
  )
  jax.block_until_ready(train(source))
  _, params, _ = got['engine/0'][0]
  jax.tree.map(np.testing.assert_array_equal, params, before)


def test_cast_to_the_rollout_dtype():
  sender, got = publisher([tiny.mesh(1, 1, skip=1)], dtype='bfloat16')
  sender.publish(1, tiny.params(0))
  _, params, _ = got['engine/0'][0]
  assert {str(x.dtype) for x in jax.tree.leaves(params)} == {'bfloat16'}


def test_handle_waits_for_every_replica():
  sender, got = publisher([tiny.mesh(1, 1, skip=1), tiny.mesh(1, 1, skip=2)])
  handle = sender.publish(1, tiny.params(0))
  assert handle.missing == {'engine/0', 'engine/1'}
  got['engine/0'][0][2](1)
  with pytest.raises(TimeoutError, match=r"version 1 .* \['engine/1'\]"):
    handle.wait(0.01)
  got['engine/1'][0][2](1)
  handle.wait(0.01)


def test_nobody_waits_for_a_replica_that_is_dead():
  """Dead before the version came, and dead while it is waited for."""
  alive = {'engine/0': True, 'engine/1': False, 'engine/2': True}
  targets = [
      dataclasses.replace(
          target(name, tiny.mesh(1, 1), []), alive=lambda n=name: alive[n]
      )
      for name in alive
  ]
  handle = Publisher(targets, events=EventLog(None)).publish(1, tiny.params(0))
  assert handle.missing == {'engine/0', 'engine/2'}
  handle.acknowledge('engine/0')
  with pytest.raises(TimeoutError, match=r"replicas \['engine/2'\]"):
    handle.wait(0.0)
  dies = threading.Timer(0.1, lambda: alive.update({'engine/2': False}))
  dies.start()
  handle.wait(WAIT_S)
  dies.join()


def test_newer_version_acknowledges_the_one_it_overtook():
  sender, got = publisher([tiny.mesh(1, 1, skip=1)])
  first = sender.publish(1, tiny.params(0))
  second = sender.publish(2, tiny.params(1))
  got['engine/0'][1][2](2)
  assert not first.missing and not second.missing


def test_versions_only_grow():
  sender, _ = publisher([tiny.mesh(1, 1, skip=1)])
  sender.publish(2, tiny.params(0))
  with pytest.raises(ValueError, match='version 2 published after 2'):
    sender.publish(2, tiny.params(0))


def test_only_the_newest_version_is_held():
  sender, _ = publisher([tiny.mesh(1, 1, skip=1)])
  with pytest.raises(LookupError, match='no version'):
    sender.latest()
  sender.publish(1, tiny.params(0))
  sender.publish(2, tiny.params(1))
  assert sender.latest()[0] == 2
  assert set(sender.get(2)) == {'engine/0'}
  with pytest.raises(LookupError, match='version 1 is not held, only 2 is'):
    sender.get(1)


ADAPTED = tiny.config(lora=LoraSettings(projections=('query',), rank=2))


def adapted_policy(seed=0):
  return parameters.init_params(ADAPTED, seed, tiny.mesh(), Rules())


def adapter_publisher(finish=None):
  got = []
  mesh = tiny.mesh(1, 2, skip=1)
  target = Target(
      'engine/0',
      parameters.param_shardings(ADAPTED, mesh, Rules()),
      lambda version, params, swapped: got.append((version, params)),
      finish,
  )
  return Publisher([target], events=EventLog(None)), got


def test_adapters_cross_alone_and_meet_the_base_that_crossed_once():
  sender, got = adapter_publisher()
  first, second = adapted_policy(0), adapted_policy(1)
  learns, _ = parameters.partition(ADAPTED, second)
  whole = sender.publish(0, first)
  alone = sender.publish(1, learns, 'adapter')
  assert whole.bytes == sum(x.nbytes for x in jax.tree.leaves(first))
  # L (D r + r N H) numbers of four bytes.
  assert alone.bytes == 2 * (32 * 2 + 2 * 32) * 4
  (_, before), (version, after) = got
  assert version == 1 and sender.latest()[1]['engine/0'] is after
  jax.tree.map(
      np.testing.assert_array_equal, after, lora.overlaid(first, learns)
  )
  assert after['embedding'] is before['embedding']  # not sent again
  assert after['blocks']['adapters']['query']['a'].sharding.mesh.size == 2


def test_a_replica_may_finish_what_arrives():
  mesh = tiny.mesh(1, 2, skip=1)
  shardings = parameters.param_shardings(tiny.config(), mesh, Rules())
  sender, got = adapter_publisher(lora.merging(ADAPTED, '', shardings))
  policy = adapted_policy(0)
  sender.publish(0, policy)
  learns, stays = parameters.partition(ADAPTED, policy)
  learns = jax.tree.map(lambda x: x + 0.5, learns)
  sender.publish(1, learns, 'adapter')
  learns = jax.tree.map(lambda x: x - 0.25, learns)
  sender.publish(2, learns, 'adapter')
  _, wanted = lora.merged(ADAPTED, lora.overlaid(stays, learns))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      got[-1][1],
      wanted,
  )


def test_adapters_without_a_base_are_refused():
  sender, _ = adapter_publisher()
  learns, _ = parameters.partition(ADAPTED, adapted_policy())
  with pytest.raises(ValueError, match="1 published as 'adapter' without a b"):
    sender.publish(1, learns, 'adapter')
