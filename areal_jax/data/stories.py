"""Openings for story models in the manner of TinyStories.

Each opening introduces one subject by name, which `meta['subject']` repeats for
rewards that ask about it. The held-out subjects have other names than the
training ones, and no opening has double quotes, so that speech in a
continuation is the model's own.
"""

from __future__ import annotations

from typing import Literal

from areal_jax.config import require
from areal_jax.types import Problem

_TRAIN = (
    ('Lily', 'Once upon a time, there was a little girl named Lily.'),
    ('Tom', 'One day, a boy named Tom went to the park with his mom.'),
    ('Max', 'Once there was a big dog named Max. He loved to run fast.'),
    ('Sue', 'Sue was a nice girl who lived in a small house.'),
    ('Kitty', 'There was a cat named Kitty. She liked to sleep in the sun.'),
    ('Ben', 'Ben had a red ball. He played with it every day.'),
    ('Mia', 'One sunny day, Mia wanted to bake a cake.'),
    ('Bob', 'Once upon a time, a frog named Bob lived in a pond.'),
    ('Anna', 'Anna was three years old. She had a new toy car.'),
    ('Sam', 'A boy named Sam found a shiny rock in the garden.'),
    ('Lucy', 'Lucy and her dad went to the beach to play in the sand.'),
    ('Bunny', 'Once there was a white rabbit named Bunny. He was very hungry.'),
    ('Jack', 'Jack loved to draw. One day, he drew a big tree.'),
    ('Molly', 'There was a brown horse named Molly who lived on a farm.'),
    ('Tim', 'Tim was sad because it was raining and he had to stay inside.'),
    ('Ella', 'One night, Ella looked out of the window and saw the moon.'),
    ('Buddy', 'Buddy was a bear who lived in the forest. He liked honey.'),
    ('Sara', 'Sara got a doll for her birthday. She was so happy.'),
    ('Billy', 'A little bird named Billy wanted to learn how to fly.'),
    ('Emma', 'Once upon a time, Emma lost her hat in the snow.'),
)

_EVAL = (
    ('Amy', 'Once upon a time, there was a kind girl called Amy.'),
    ('Leo', 'A lion named Leo lived near a river. He was very brave.'),
    ('Jane', 'Jane went to the zoo and saw many animals.'),
    ('Fred', 'One morning, a fish named Fred swam far away from home.'),
    ('Daisy', 'Daisy was a cow who liked to eat green grass.'),
    ('Peter', 'Peter had a blue bike. He rode it up the hill.'),
    ('Rosie', 'Once there was a mouse named Rosie. She was very small.'),
    ('John', 'John and his sister were building a tower with blocks.'),
    ('Duke', 'There was an old duck named Duke who could not swim.'),
    ('Zoe', 'Zoe wanted to be a dancer. She danced all day long.'),
    ('Mark', 'Mark was playing with his truck in the kitchen.'),
    ('Penny', 'A pig named Penny loved to jump in the mud.'),
    ('Alice', 'One day, Alice planted a seed next to the fence.'),
    ('Oscar', 'Once upon a time, an owl named Oscar could not sleep.'),
    ('Nina', 'Nina was afraid of the dark. She called for her grandma.'),
    ('Henry', 'Henry went to the store to buy some apples.'),
    ('Coco', 'Coco was a monkey. She lived in a very tall palm.'),
    ('Grace', 'Grace had a warm yellow coat, but one button was missing.'),
    ('Paul', 'A boy named Paul took a boat out on the lake.'),
    ('Ruby', 'There was a fairy named Ruby who had lost her wand.'),
)

_OPENINGS = {'train': _TRAIN, 'eval': _EVAL}


def openings(
    split: Literal['train', 'eval'], count: int = 20, seed: int = 0
) -> list[Problem]:
  """The first `count` openings of a split; each has 20.

  They have no right answer; `answer` is empty.

  Args:
    split: 'train' or 'eval'.
    count: how many.
    seed: without effect, the openings are written down.

  Raises:
    ConfigError: an unknown split, or more openings than there are.
  """
  del seed
  require(split in _OPENINGS, 'split', split, f'one of {tuple(_OPENINGS)}')
  chosen = _OPENINGS[split]
  require(1 <= count <= len(chosen), 'count', count, f'1..{len(chosen)}')
  return [
      Problem(f'stories/{split}/{i}', 'stories', text, '', {'subject': subject})
      for i, (subject, text) in enumerate(chosen[:count])
  ]
