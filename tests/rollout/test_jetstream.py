"""A policy served by the stock orchestrator answers what our engine generates.

One child process runs `python -m areal_jax.serve --jetstream` on the folder of
a made-up run, and this process asks it over gRPC. What it ought to say comes
from `rollout.engine` here, on the same weights.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Sequence

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
import numpy as np
import pytest

from areal_jax.mesh.rules import Rules
from areal_jax.models.hf import save_hf
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.prefix_engine import PrefixEngine
from areal_jax.telemetry import run_folder
from areal_jax.tokenizer.base import render_prompt
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from tests import tiny
from tests.limits import WAIT_S

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ENGINE = EngineSettings(
    slots=2, max_length=48, max_prompt_length=20, page_size=16, steps=2
)
LETTERS = 'abcdefghijklmnopqrstuvwxyz 0123456789'[: tiny.VOCABULARY - 4]
CONFIG = f"""\
from areal_jax.settings import Experiment, RolloutSettings
from areal_jax.mesh.slices import MeshSettings, RolloutMesh
from areal_jax.rollout.engine import EngineSettings
from areal_jax.rollout.sampling import SamplingFeatures


def get_config():
  return Experiment(
      mesh=MeshSettings(rollout=RolloutMesh(tensor=2)),
      rollout=RolloutSettings(max_new_tokens=8, engine={ENGINE!r}),
  )
"""


@dataclasses.dataclass(frozen=True)
class Server:
  """A server under way and how to ask it."""

  process: subprocess.Popen
  stub: jetstream_pb2_grpc.OrchestratorStub
  tokenizer: SentencePieceTokenizer

  def ask(self, max_tokens: int, **content) -> tuple[list[int], str]:
    """Token ids and text of an answer, in the pieces that they came in."""
    request = jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **content)
    ids, text = [], ''
    for response in self.stub.Decode(request, timeout=WAIT_S):
      (sample,) = response.stream_content.samples
      ids.extend(sample.token_ids)
      text += sample.text
    return ids, text


def text_content(text: str):
  return {'text_content': jetstream_pb2.DecodeRequest.TextContent(text=text)}


def token_content(ids: Sequence[int]):
  content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=ids)
  return {'token_content': content}


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  folder = tmp_path_factory.mktemp('jetstream')
  run = folder / 'run'
  save_hf(run / run_folder.POLICY, tiny.config(), tiny.params(0))
  path = train_sentencepiece([LETTERS], run / run_folder.TOKENIZER)
  (folder / 'config.py').write_text(CONFIG)
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  arguments = [
      f'--config={folder}/config.py',
      f'--run={run}',
      f'--port={port}',
      '--jetstream',
  ]
  with open(folder / 'errors', 'w') as errors:
    process = subprocess.Popen(
        [sys.executable, '-m', 'areal_jax.serve', *arguments],
        cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
  try:
    said = process.stdout.readline()  # it speaks when it is ready, or ends
    assert f'on port {port}' in said, (folder / 'errors').read_text()
    with grpc.insecure_channel(f'localhost:{port}') as channel:
      stub = jetstream_pb2_grpc.OrchestratorStub(channel)
      yield Server(process, stub, SentencePieceTokenizer(path))
  finally:
    process.kill()
    process.communicate()


@pytest.fixture(scope='module')
def engine():
  """The same on a mesh like the server's: two devices, heads divided."""
  return Engine(tiny.config(), ENGINE, tiny.mesh(1, 2), Rules())


def greedy(engine: Engine, prompt: Sequence[int], new: int, seed: int = 0):
  """Ids that the engine answers a prompt with, without the one it stops at."""
  room = ENGINE.max_length - len(prompt)
  request = tiny.request(
      prompt=prompt, new=room, temperature=0.0, stop_ids=(2,)
  )
  weights = tiny.params(seed, engine.mesh)
  prefixes = PrefixEngine(engine)
  prefix = prefixes.prefill(
      params=weights,
      padded_tokens=engine.pad_prompt(prompt),
      true_length=len(prompt),
  )
  state = prefixes.insert(prefix, engine.init_decode_state(), 1, request)
  ids, active = [], True
  while active:
    state, result = prefixes.generate(weights, state)
    ids.append(int(result.tokens[1, 0]))
    active = bool(result.active[1])
  if ids[-1] == 2:
    ids.pop()
  return ids[:new]


PROMPTS = ('hello', 'a', '1 2 3', 'the quick fox', 'zzz', 'abc', 'what now')
LIMITS = (5, 12, 1, 40, 7, 40, 9)  # 40 is more than fits behind any prompt


@pytest.fixture(scope='module')
def answers(server):
  """Answers to seven prompts asked at once of two slots."""
  with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
    asked = [
        pool.submit(server.ask, limit, **text_content(prompt))
        for prompt, limit in zip(PROMPTS, LIMITS)
    ]
    return [future.result() for future in asked]


def expected(server, engine, seed=0):
  return [
      greedy(
          engine, render_prompt(server.tokenizer, p, add_bos=True), limit, seed
      )
      for p, limit in zip(PROMPTS, LIMITS)
  ]


def test_answers_are_what_the_engine_generates_greedily(
    server, engine, answers
):
  wanted = expected(server, engine)
  assert [ids for ids, _ in answers] == wanted
  assert len({tuple(ids) for ids in wanted}) > 4  # and they say something
  assert server.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live


def test_other_weights_are_seen(server, engine, answers):
  assert [ids for ids, _ in answers] != expected(server, engine, seed=1)


def test_answers_end_at_the_limit_or_where_the_slot_is_full(answers):
  """The engine's own limit is reached behind a prompt of 13 letters and BOS."""
  lengths = [len(ids) for ids, _ in answers]
  assert lengths[2] == 1
  assert all(n <= limit for n, limit in zip(lengths, LIMITS))
  assert lengths[3] == ENGINE.max_length - len(PROMPTS[3]) - 1


def test_text_is_that_of_the_ids(server, answers):
  spoken = [(ids, text) for ids, text in answers if min(ids) >= 4]
  assert spoken
  for ids, text in spoken:
    assert text == server.tokenizer.decode(ids)


def test_client_side_token_ids_are_answered_like_their_text(server, answers):
  ids = server.tokenizer.encode(PROMPTS[1])
  assert server.ask(LIMITS[1], **token_content(ids))[0] == answers[1][0]


def test_prompt_that_is_too_long_keeps_bos_and_its_end(server, engine):
  ids = np.random.default_rng(0).integers(4, tiny.VOCABULARY, 90).tolist()
  bos, limit = server.tokenizer.bos_id, ENGINE.max_prompt_length
  for length in (limit, 25, 32, 90):  # JetStream cuts what exceeds 32 with BOS
    got, _ = server.ask(6, **token_content(ids[:length]))
    kept = [bos, *ids[:length][-(limit - 1) :]]
    assert got == greedy(engine, kept, 6), length


def test_mistakes_of_a_client_leave_the_server_alone(server, answers):
  server.ask(3, **text_content(''))
  server.ask(3, **token_content([10**6, -5]))
  with pytest.raises(grpc.RpcError):
    server.ask(3)
  again, _ = server.ask(LIMITS[0], **text_content(PROMPTS[0]))
  assert again == answers[0][0]


def test_sigterm_ends_it_with_exit_code_0_and_nothing_more_is_said(server):
  """The last test of the file: the server is gone afterwards."""
  server.process.send_signal(signal.SIGTERM)
  out, _ = server.process.communicate(timeout=WAIT_S)
  assert server.process.returncode == 0
  assert out == ''  # the orchestrator would tell each token
