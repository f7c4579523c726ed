"""What the scripts that drive torch have in common: the policy.

They run in an environment that has torch and transformers, by their path, so
this folder is where they find it.
"""

import torch
import transformers


def build(shape, *, even):
  """Qwen2 of a shape, random weights.

  Args:
    shape: of the policy.
    even: its unembedding is 0: every token is as likely as any other.
  """
  torch.manual_seed(0)
  model = transformers.Qwen2ForCausalLM(
      transformers.Qwen2Config(
          vocab_size=shape['vocab_size'],
          hidden_size=shape['width'],
          num_hidden_layers=shape['layers'],
          num_attention_heads=shape['heads'],
          num_key_value_heads=shape['kv_heads'],
          intermediate_size=shape['mlp_width'],
          max_position_embeddings=shape['max_length'],
          tie_word_embeddings=False,
          bos_token_id=None,
          eos_token_id=None,
          pad_token_id=0,
      )
  )
  if even:
    with torch.no_grad():
      model.lm_head.weight.zero_()
  return model
