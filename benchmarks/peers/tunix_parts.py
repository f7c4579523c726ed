"""What the scripts that drive Tunix have in common: policy and tokenizer.

They run in an environment that has google-tunix 0.1.7, by their path, so this
folder is where they find it.
"""

from flax import nnx
from tunix.models.qwen2 import model as qwen2

_FIRST = 0x4E00  # token i is written as the character of this number + i


class Characters:
  """Token ids as characters; without a first token, which would be added."""

  def encode(self, text, **_):
    return [ord(character) - _FIRST for character in text]

  def decode(self, ids, **_):
    return ''.join(chr(_FIRST + int(i)) for i in ids)

  def bos_id(self):
    return 0

  def eos_id(self):
    return 0

  def pad_id(self):
    return 0


def build(shape, *, even):
  """Qwen2 of a shape, random weights.

  Args:
    shape: of the policy.
    even: its unembedding is 0: every token is as likely as any other.
  """
  model = qwen2.Qwen2(
      qwen2.ModelConfig(
          num_layers=shape['layers'],
          vocab_size=shape['vocab_size'],
          embed_dim=shape['width'],
          hidden_dim=shape['mlp_width'],
          num_heads=shape['heads'],
          head_dim=shape['head_size'],
          num_kv_heads=shape['kv_heads'],
          rope_theta=10_000,
          norm_eps=1e-6,
      ),
      rngs=nnx.Rngs(0),
  )
  if even:
    model.lm_head.w[...] = 0 * model.lm_head.w[...]
  return model
