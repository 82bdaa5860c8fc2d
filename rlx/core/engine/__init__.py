"""The loop of a run, its workers and where they live."""

import os

from rlx.core.openmp import openmp_environment

# Before any module of the package imports torch.
os.environ.update(openmp_environment())
