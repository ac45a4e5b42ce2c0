"""Tests run torch on one thread: two on a busy machine are many times slower than one."""

import os

import torch

torch.set_num_threads(1)
os.environ.pop("COLUMNS", None)  # parallel test workers are told a width, and tables would fold
