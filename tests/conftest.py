"""Tests run torch on one thread: two on a busy machine are many times slower than one."""

import torch

torch.set_num_threads(1)
