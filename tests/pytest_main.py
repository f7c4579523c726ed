"""Bazel's way into pytest: runs the test files given as arguments."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
